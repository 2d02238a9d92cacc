"""Our operators against their composite forms: values, and gradients by autograd of the composite, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.operators import (
    GroupedProducts,
    LoopedProducts,
    Permutation,
    _GatedExperts,
    gated_experts,
    grouped_products_apply,
    masked_entries,
    pad_rows,
    permute,
    rms_norm,
    rotate,
    unpad_rows,
    unpermute,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients of a weighted sum (weights that no symmetry hides)."""
    assert torch.allclose(ours, expected, atol=1e-12, rtol=0)
    weights = draw(*expected.shape, seed=9).detach()
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, expected)), strict=True)
    for found, wanted in pairs:
        assert torch.allclose(found, wanted, atol=1e-11, rtol=0)


@pytest.mark.parametrize("shape", [(5, 1, 8), (7, 1, 3, 4)])
def test_rms_norm(shape):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    assert_same(rms_norm(x, weight, 0.1), expected, [x, weight])


def test_rms_norm_of_low_precision_is_torchs():
    x, weight = draw(4, 8).bfloat16(), draw(8, seed=1).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))


def test_rotation_turns_each_pair_by_its_angle():
    x, angle = draw(6, 3, 8), draw(6, 1, 4, seed=1).detach()
    first, second = x.chunk(2, dim=-1)
    expected = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    assert_same(rotate(x, cos, sin), expected, [x])


def test_padding_and_back():
    """Three rows of 2, 3 and 1 tokens, padded to 3: slot 2 repeats token 1, slots 7 and 8 token 5."""
    x = draw(6, 4)
    source, place = torch.tensor([0, 1, 1, 2, 3, 4, 5, 5, 5]), torch.tensor([0, 1, 3, 4, 5, 6])
    slots = pad_rows(x, source, place)
    assert torch.equal(slots, x[source])
    used = torch.zeros(9, 1, dtype=torch.float64).index_fill_(0, place, 1.0)
    assert_same(slots * used, x[source] * used, [x])
    y = draw(9, 4, seed=2)
    assert_same(unpad_rows(y, place), y[place], [y])


def test_permutation_and_its_inverse():
    """Rows with two, no, one and three copies."""
    source, count = torch.tensor([3, 0, 3, 2, 0, 3]), torch.tensor([2, 0, 1, 3])
    permutation = Permutation.of(source, count)
    x, y = draw(4, 5), draw(6, 5, seed=1)
    assert_same(permute(x, permutation), x[source], [x])
    assert_same(unpermute(y, permutation), torch.zeros_like(x).index_add(0, source, y), [y])


def test_entries_of_a_mask_are_sorted_by_column_and_then_row():
    mask = torch.zeros(5, 6, dtype=torch.bool)
    for row, columns in enumerate([(0, 3), (3, 5), (0, 1), (4, 5), (0, 5)]):
        mask[row, list(columns)] = True
    row, column = masked_entries(mask, 2)
    assert row.tolist() == [0, 2, 4, 2, 0, 1, 3, 1, 3, 4]
    assert column.tolist() == [0, 0, 0, 1, 3, 3, 4, 5, 5, 5]


def test_entries_are_found_without_the_kernel_of_newer_torch(monkeypatch):
    mask = torch.rand(7, 9).argsort(1) < 3
    expected = masked_entries(mask, 3)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(torch, "nonzero_static", missing)
    assert all(torch.equal(a, b) for a, b in zip(masked_entries(mask, 3), expected, strict=True))


# all experts busy, idle ones first, between and last, one expert, one row, no row
COUNTS = [[4, 3, 5], [0, 12, 0], [12, 0, 0], [5, 0, 7], [12], [0, 1, 0], [0, 0]]


def experts_of(counts: list[int], h: int = 6, f: int = 4) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Rows, probabilities and the experts' weights, in float64."""
    n = sum(counts)
    up = [draw(2 * f, h, seed=2 + i) for i in range(len(counts))]
    down = [draw(h, f, seed=7 + i) for i in range(len(counts))]
    return draw(n, h), draw(n, seed=1), up, down


def experts_one_by_one(x: Tensor, probs: Tensor, counts: list[int], up: list[Tensor], down: list[Tensor]) -> Tensor:
    parts = []
    for rows, p, u, d in zip(x.split(counts), probs.split(counts), up, down, strict=True):
        gate, linear = (rows @ u.t()).chunk(2, dim=1)
        parts.append((torch.sigmoid(gate) * gate * linear * p[:, None]) @ d.t())
    return torch.cat(parts)


@pytest.mark.parametrize("counts", COUNTS)
def test_experts(counts):
    x, probs, up, down = experts_of(counts)
    expected = experts_one_by_one(x, probs, counts, up, down)
    assert_same(gated_experts(x, probs, torch.tensor(counts), up, down), expected, [x, probs, *up, *down])


def results(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The values of ``y`` and the gradients of a weighted sum of them, in float64."""
    gradients = torch.autograd.grad((y * draw(*y.shape, seed=9).detach().to(y.dtype)).sum(), inputs)
    return [x.detach().double() for x in (y, *gradients)]


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)])
def test_grouped_products_are_those_of_the_loop(counts):
    """In bfloat16, which the kernel needs: near float64, and nearer to the loop in bfloat16."""
    x, probs, up, down = experts_of(counts, h=32, f=16)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, probs, *up, *down)]
    exact = [t.detach().double().requires_grad_() for t in low]
    weights, n = exact[2:], len(counts)
    expected = results(experts_one_by_one(*exact[:2], counts, weights[:n], weights[n:]), exact)
    sizes = torch.tensor(counts)
    grouped = GroupedProducts(sizes.cumsum(0, dtype=torch.int32), sizes == 0)
    looped = LoopedProducts(counts)
    grouped_found, looped_found = (
        results(_GatedExperts.apply(*low[:2], products, *low[2:]), low) for products in (grouped, looped)
    )
    for a, b, truth in zip(grouped_found, looped_found, expected, strict=True):
        scale = float(truth.abs().max())
        assert float((a - truth).abs().max()) <= 0.03 * scale
        assert float((a - b).abs().max()) <= 0.01 * scale


@pytest.mark.parametrize(
    "change, applies",
    [
        (dict(), hasattr(torch.nn.functional, "grouped_mm")),
        (dict(is_cuda=False), False),
        (dict(dtype=torch.float32), False),
        (dict(dtype=torch.float16), False),
        (dict(shape=(0, 32)), False),
        (dict(shape=(3, 20)), False),
    ],
)
def test_where_torch_has_a_grouped_kernel(change, applies):
    rows = SimpleNamespace(**{"is_cuda": True, "dtype": torch.bfloat16, "shape": (3, 32), **change})
    assert grouped_products_apply(rows, 16) is applies
    assert grouped_products_apply(rows, 12) is False


def test_older_torch_has_no_grouped_kernel(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    assert not grouped_products_apply(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(3, 32)), 16)
