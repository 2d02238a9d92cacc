"""Our operators against their composite forms: values, and gradients by autograd of the composite, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.operators import (
    Permutation,
    gated_experts,
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


@pytest.mark.parametrize("counts", [[4, 3, 5], [0, 12, 0], [12]])
def test_experts(counts):
    x, probs = draw(12, 6), draw(12, seed=1)
    up = [draw(8, 6, seed=2 + i) for i in range(len(counts))]
    down = [draw(6, 4, seed=7 + i) for i in range(len(counts))]
    parts = []
    for rows, p, u, d in zip(x.split(counts), probs.split(counts), up, down, strict=True):
        gate, linear = (rows @ u.t()).chunk(2, dim=1)
        parts.append((torch.sigmoid(gate) * gate * linear * p[:, None]) @ d.t())
    assert_same(gated_experts(x, probs, counts, up, down), torch.cat(parts), [x, probs, *up, *down])
