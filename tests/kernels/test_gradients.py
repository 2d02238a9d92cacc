"""The kernels that add gradients to Megatron's buffers, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels.operators import add_embedding_gradient, add_expert_gradients
from megatron_gspo.mcore.equidistant import Equidistant
from tests.kernels.errors import assert_near, check_operator

# elements of an expert below, of and above a program's
SIZES = [(1, 3), (2, 1024), (7, 401)]
COUNTS = [[4], [2, 0, 3], [0, 0, 5, 1, 0]]
VOCABULARY = 11
# no token, one, one id for all, some of other ranks, and a run that is longer than a program reads
IDS = [[], [3], [2] * 5, [0, 10, -4, 3, 3, 11, 0, 25], [5, *[7] * 37, 6, 7]]
# of a row: below, of and above a program's columns
WIDTHS = [8, 512, 700]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def totals_in_a_buffer(experts: int, shape: tuple[int, int], reverse: bool) -> list[Tensor]:
    """Views of one buffer, with other elements between them."""
    size = math.prod(shape)
    step = size + 5
    buffer = draw(experts * step, seed=7)
    totals = [buffer[3 + i * step :][:size].view(shape) for i in range(experts)]
    return totals[::-1] if reverse else totals


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("shape", SIZES)
def test_gradients_of_experts(shape, counts, reverse):
    totals = totals_in_a_buffer(len(counts), shape, reverse)
    whole = totals[0].untyped_storage()
    before = torch.tensor([], dtype=torch.float32).set_(whole).clone()
    gradients = draw(len(counts), *shape, seed=0).bfloat16()
    gradients[torch.tensor(counts) == 0] = math.nan  # which the product need not write
    expected = [total.double() for total in totals]
    for total, gradient, count in zip(expected, gradients, counts, strict=True):
        if count:
            total += gradient.double()
    inside = sum(total.sum() for total in totals)

    buffer = Equidistant.of(totals)
    assert buffer is not None and buffer.reverse is (reverse and len(counts) > 1)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    add_expert_gradients(buffer.tensor, gradients, ends, buffer.reverse)
    for total, exact in zip(totals, expected, strict=True):
        assert_near(total, exact, torch.float32)
    after = torch.tensor([], dtype=torch.float32).set_(whole)
    changed = sum(total.sum() for total in totals) - inside
    assert torch.allclose(after.sum() - before.sum(), changed, atol=1e-2), "nothing between them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ids", IDS)
def test_gradients_of_embeddings(ids, width, dtype):
    total = draw(VOCABULARY, width, seed=1)
    rows = draw(len(ids), width, seed=2).to(dtype)
    expected = total.double()
    for i, row_id in enumerate(ids):
        if 0 <= row_id < VOCABULARY:
            expected[row_id] += rows[i].double()
    sorted_ids, order = torch.tensor(ids, dtype=torch.int32).sort(stable=True)
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    add_embedding_gradient(total, rows, sorted_ids, order, ends)
    assert_near(total, expected, torch.float32)


def test_shapes_of_the_operators():
    gradients = draw(2, 3, 4, seed=0)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    check_operator(add_expert_gradients, (torch.zeros(2, 3, 4), gradients, ends, False))
    ids = torch.tensor([0, 2])
    check_operator(
        add_embedding_gradient,
        (torch.zeros(3, 4), draw(2, 4, seed=1), ids, torch.arange(2), torch.tensor([1, 2])),
    )
