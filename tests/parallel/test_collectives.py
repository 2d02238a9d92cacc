"""Each collective by hand: over all ranks, over one, and over none. Subgroups are in
test_subgroups.py.
"""

import torch
import torch.distributed as dist

from megatron_gspo.parallel.collectives import (
    gather_rows,
    group_rank,
    group_size,
    scatter_summed_rows,
    sum_in_place,
)
from tests.support.distributed import run_distributed


def test_without_a_group_the_input_comes_back():
    x = torch.arange(6.0).view(3, 2)
    assert (group_size(None), group_rank(None)) == (1, 0)
    assert (
        gather_rows(x, None) is x
        and scatter_summed_rows(x, None) is x
        and sum_in_place(x, None) is x
    )


def over_three(rank, world_size):
    group = dist.group.WORLD
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0]]) * (rank + 1)
    wide = torch.arange(6.0).view(6, 1) * 10**rank
    # Not contiguous.
    strided = torch.stack([torch.full((2,), float(rank)), torch.zeros(2)], 1)[:, 0]
    summed = x.clone()
    returned = sum_in_place(summed, group)
    untouched = x.clone()
    gather_rows(x, group), scatter_summed_rows(wide, group)
    assert torch.equal(x, untouched)
    return {
        "place": (group_size(group), group_rank(group)),
        "gathered": gather_rows(x, group)[:, 0].tolist(),
        "shape": tuple(gather_rows(x[None], group).shape),
        "strided": gather_rows(strided, group).tolist(),
        "scattered": scatter_summed_rows(wide, group).squeeze(1).tolist(),
        "summed": summed.tolist(),
        "same": returned is summed,
        "integers": gather_rows(torch.tensor([rank]), group).tolist(),
        "empty": tuple(gather_rows(x[:0], group).shape),
    }


def test_over_three_ranks():
    for rank, found in enumerate(run_distributed(over_three, 3)):
        assert found["place"] == (3, rank)
        assert found["gathered"] == [1, 2, 2, 4, 3, 6]  # in the order of ranks
        assert found["shape"] == (3, 2, 2) and found["empty"] == (0, 2)
        assert found["strided"] == [0, 0, 1, 1, 2, 2] and found["integers"] == [0, 1, 2]
        assert found["scattered"] == [111.0 * (2 * rank), 111.0 * (2 * rank + 1)]
        assert found["summed"] == [[6, 60], [12, 120]] and found["same"]
