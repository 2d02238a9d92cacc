"""Everything stays within the group that was given: ranks 0 and 2 apart from ranks 1 and 3, by hand."""

import torch
import torch.distributed as dist

from megatron_gspo.parallel import reduce_metrics
from megatron_gspo.parallel.collectives import gather_rows, group_rank, group_size, scatter_summed_rows, sum_in_place
from megatron_gspo.parallel.context_parallel import all_gather_tokens, sum_over
from tests.support.distributed import run_distributed


def _in_pairs(rank, world_size):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, first, second = pairs[rank % 2], rank % 2, rank % 2 + 2
    assert (group_size(mine), group_rank(mine)) == (2, rank // 2)
    x = torch.full((2, 1), float(rank))
    assert gather_rows(x, mine).squeeze(1).tolist() == [first, first, second, second]
    assert scatter_summed_rows(x, mine).tolist() == [[first + second]]
    assert sum_in_place(x.clone(), mine).squeeze(1).tolist() == [first + second] * 2
    assert sum_over(mine)(x).squeeze(1).tolist() == [first + second] * 2
    part = x.clone().requires_grad_()
    (all_gather_tokens(part, mine).squeeze(1) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)).sum().backward()
    weights = [1.0, 2.0] if rank == first else [3.0, 4.0]
    assert part.grad.squeeze(1).tolist() == [weight * (first + second + 2) for weight in weights]
    metrics = reduce_metrics({f"of_{rank}": float(rank), "largest_max": float(rank)}, mine)
    assert {name: float(value) for name, value in metrics.items()} == {
        f"of_{first}": first,
        f"of_{second}": second,
        "largest_max": second,
    }


def test_two_pairs_of_ranks_do_not_meet():
    run_distributed(_in_pairs, 4)


def test_no_group_has_one_rank():
    assert (group_size(None), group_rank(None)) == (1, 0)
