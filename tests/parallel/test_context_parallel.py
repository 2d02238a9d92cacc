"""Ownership of tokens under context parallelism, and the collectives that put them together."""

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.parallel import all_gather_tokens, sum_over, zigzag_indices
from tests.support.distributed import run_distributed

BOUNDS = [0, 16, 16, 24, 64]  # lengths 16, 0, 8, 40: all multiples of 2 * 4


def test_worked_case():
    """Lengths 8 and 4 on two ranks: chunks of two and of one position; rank 0 has the first and
    the last.
    """
    assert zigzag_indices([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_matches_a_loop(cp_size):
    owned = []
    for rank in range(cp_size):
        expected = []
        for start, end in zip(BOUNDS[:-1], BOUNDS[1:], strict=True):
            positions = list(range(start, end))
            width = len(positions) // (2 * cp_size)
            for chunk in (rank, 2 * cp_size - 1 - rank):
                expected += positions[chunk * width : (chunk + 1) * width]
        actual = zigzag_indices(torch.tensor(BOUNDS, dtype=torch.int32), rank, cp_size)
        assert actual.dtype == torch.int64 and actual.tolist() == expected
        owned += expected
    assert sorted(owned) == list(range(BOUNDS[-1]))


@pytest.mark.parametrize(
    ("bounds", "rank", "message"),
    [
        (
            [0, 8, 14],
            0,
            (
                "sequence 1 has 6 positions, not a multiple of 2 * cp_size = 4; pad every sequence"
                " to one (pack with sequence_multiple=4)"
            ),
        ),
        ([0, 8], 2, "cp_rank=2 is not in [0, cp_size=2)"),
        ([0, 8], -1, "cp_rank=-1 is not in [0, cp_size=2)"),
    ],
)
def test_refuses(bounds, rank, message):
    with pytest.raises(ValueError) as error:
        zigzag_indices(bounds, rank, 2)
    assert str(error.value) == message


def test_no_group_is_one_process():
    x = torch.arange(6.0, requires_grad=True)
    assert all_gather_tokens(x, None) is x and sum_over(None)(x) is x


def _all_gather_tokens(rank, world_size):
    """Each rank's loss weighs the gathered tensor by its own weights; compare with the sum of
    all losses.
    """
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(
        4 * world_size, 3, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weights = torch.randn(world_size, 4 * world_size, 3, generator=generator, dtype=torch.float64)
    shard = full.detach().chunk(world_size)[rank].clone().requires_grad_()
    gathered = all_gather_tokens(shard, dist.group.WORLD)
    assert torch.equal(gathered, full)
    (gathered.sin() * weights[rank]).sum().backward()
    (full.sin() * weights).sum().backward()
    torch.testing.assert_close(
        shard.grad, full.grad.chunk(world_size)[rank], rtol=1e-12, atol=1e-12
    )
    factor = torch.ones_like(full).requires_grad_()
    (grad,) = torch.autograd.grad(
        (all_gather_tokens(shard, dist.group.WORLD) * factor).sum(), shard, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_gather_tokens_and_its_gradient(world_size):
    run_distributed(_all_gather_tokens, world_size)


def _sum_over(rank, world_size):
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    total = sum_over(dist.group.WORLD)(x.t())
    assert total.shape == (3, 2) and not total.requires_grad
    assert (x == rank + 1).all(), "the input is not to be changed"
    return total


def test_sum_over_adds_without_touching_its_input():
    assert all((total == 1 + 2 + 3).all() for total in run_distributed(_sum_over, 3))
