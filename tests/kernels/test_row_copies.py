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


def routes(tokens: int, experts: int, per_token: int, *, busiest: int | None = None) -> Tensor:
    """[tokens, experts], each row with ``per_token`` true entries; among the first ``busiest``."""
    scores = draw(tokens, experts, seed=0)
    if busiest is not None:
        scores[:, busiest:] = -torch.inf
    return torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, scores.topk(per_token).indices, True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, experts, per_token, width", SHAPES)
def test_copies_and_sums(tokens, experts, per_token, width, dtype):
    busiest = max(per_token, experts // 2)  # the other experts have no row
    copies = TokenCopies.of(routes(tokens, experts, per_token, busiest=busiest), per_token)
    x = draw(tokens, width, seed=1).to(dtype)
    rows = copy_rows(x, copies.token)
    assert torch.equal(rows, x[copies.token])
    scaled = rows * draw(len(rows), 1, seed=2).to(dtype)
    sums = sum_rows(scaled, copies.slot)
    assert sums.dtype == dtype
    assert_near(sums, scaled.double()[copies.slot].sum(1), dtype)


def test_gradients_are_those_of_the_torch_form(monkeypatch):
    copies = TokenCopies.of(routes(7, 5, 3), 3, last_first=True)
    weights = draw(7, 24, seed=2)

    def run() -> list[Tensor]:
        x = draw(7, 24, seed=1).requires_grad_()
        sums = sum_copies(copy_tokens(x, copies).sin(), copies)
        (sums * weights).sum().backward()
        return [sums, x.grad]

    composite = run()
    monkeypatch.setattr(token_copies, "row_kernels_apply", lambda x: True)
    for ours, expected in zip(run(), composite, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_rows_of_a_larger_tensor_and_repeated_rows():
    x = draw(6, 40, seed=0)[::2, 3:20]
    source = torch.tensor([2, 0, 0, 1, 2, 2, 2])
    assert torch.equal(copy_rows(x, source), x[source])
    slot = torch.tensor([[0, 0], [2, 1]])
    assert torch.allclose(sum_rows(x, slot), x[slot].sum(1))


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert copy_rows(draw(3, 8, seed=0), empty).shape == (0, 8)
    assert sum_rows(draw(3, 8, seed=0), empty.view(0, 2)).shape == (0, 8)


def test_shapes_of_the_operators():
    x = draw(4, 8, seed=0)
    check_operator(copy_rows, (x, torch.tensor([3, 0, 0])))
    check_operator(sum_rows, (x, torch.tensor([[3, 0], [1, 1]])))
