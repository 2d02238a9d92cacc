"""The kernels of copies and their sums against float64, over shapes that don't fill their tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels.operators import copy_rows, sum_rows
from megatron_gspo.mcore import token_copies
from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens, sum_copies
from tests.kernels.errors import assert_near, check_operator

# tokens, experts and copies of each token; widths below, of and above a tile
SHAPES = [(1, 1, 1, 3), (1, 4, 2, 8), (5, 3, 3, 512), (9, 128, 8, 513), (17, 6, 2, 2048)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copies_of(tokens: int, experts: int, per_token: int, *, dropped: float = 0.0) -> TokenCopies:
    """To ``per_token`` experts of the first half, without this share of them; sorted from the last
    to the first expert."""
    scores = draw(tokens, experts, seed=0)
    scores[:, max(per_token, experts // 2) :] = -torch.inf  # these experts have no row
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, scores.topk(per_token).indices, True
    )
    chosen &= draw(tokens, experts, seed=3).sigmoid() >= dropped
    return TokenCopies.of(chosen, int(chosen.sum()), most=per_token, last_first=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("tokens, experts, per_token, width", SHAPES)
def test_copies_and_sums(tokens, experts, per_token, width, dropped, dtype):
    copies = copies_of(tokens, experts, per_token, dropped=dropped)
    x = draw(tokens, width, seed=1).to(dtype)
    rows = copy_rows(x, copies.token)
    assert torch.equal(rows, x[copies.token])
    scaled = rows * draw(len(rows), 1, seed=2).to(dtype)
    sums = sum_rows(scaled, copies.slot, copies.first, copies.most)
    assert sums.dtype == dtype
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    assert_near(sums, expected.index_add(0, copies.token, scaled.double()), dtype)


def test_gradients_are_those_of_the_torch_form(monkeypatch):
    copies = copies_of(7, 5, 3, dropped=0.3)
    weights = draw(7, 24, seed=2)

    def run() -> list[Tensor]:
        x = draw(7, 24, seed=1).requires_grad_()
        sums = sum_copies(copy_tokens(x, copies).sin(), copies)
        (sums * weights).sum().backward()
        return [sums, x.grad]

    composite = run()
    monkeypatch.setattr(token_copies, "row_kernels_apply", lambda x, name: True)
    for ours, expected in zip(run(), composite, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_rows_of_a_larger_tensor_and_repeated_rows():
    x = draw(6, 40, seed=0)[::2, 3:20]
    source = torch.tensor([2, 0, 0, 1, 2, 2, 2])
    assert torch.equal(copy_rows(x, source), x[source])
    slot = torch.tensor([0, 0, 2, 1])
    expected = torch.stack([2 * x[0], torch.zeros(17), x[2] + x[1]])
    assert torch.allclose(sum_rows(x, slot, torch.tensor([0, 2, 2]), 2), expected)


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert copy_rows(draw(3, 8, seed=0), empty).shape == (0, 8)
    assert sum_rows(draw(3, 8, seed=0), empty, empty, 2).shape == (0, 8)
    assert not sum_rows(draw(0, 8, seed=0), empty, torch.zeros(2, dtype=torch.int64), 2).any()


def test_shapes_of_the_operators():
    x = draw(4, 8, seed=0)
    check_operator(copy_rows, (x, torch.tensor([3, 0, 0])))
    check_operator(sum_rows, (x, torch.tensor([3, 0, 1]), torch.tensor([0, 2]), 2))
