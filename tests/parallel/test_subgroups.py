"""Everything stays within the group that was given: ranks 0 and 2 apart from ranks 1 and 3, by
hand.
"""

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.parallel import reduce_metrics
from megatron_gspo.parallel.collectives import (
    gather_rows,
    group_rank,
    group_size,
    scatter_summed_rows,
    sum_in_place,
)
from megatron_gspo.parallel.context_parallel import all_gather_tokens, sum_over
from megatron_gspo.parallel.host_exchange import (
    broadcast_array,
    broadcast_bytes,
    exchange_bytes,
    gather_bytes,
    gather_rows_of_ranks,
    max_over_ranks,
    rows_in_place,
    sum_over_ranks,
)
from megatron_gspo.parallel.rank_zero import first_failure
from tests.support.distributed import run_distributed


def _in_pairs(rank, world_size):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own_pair = pairs[rank % 2]
    first = rank % 2
    second = rank % 2 + 2
    assert (group_size(own_pair), group_rank(own_pair)) == (2, rank // 2)
    x = torch.full((2, 1), float(rank))
    assert gather_rows(x, own_pair).squeeze(1).tolist() == [first, first, second, second]
    assert scatter_summed_rows(x, own_pair).tolist() == [[first + second]]
    assert sum_in_place(x.clone(), own_pair).squeeze(1).tolist() == [first + second] * 2
    assert sum_over(own_pair)(x).squeeze(1).tolist() == [first + second] * 2
    leaf = x.clone().requires_grad_()
    (
        all_gather_tokens(leaf, own_pair).squeeze(1)
        * torch.tensor([1.0, 2.0, 3.0, 4.0])
        * (rank + 1)
    ).sum().backward()
    weights = [1.0, 2.0] if rank == first else [3.0, 4.0]
    assert leaf.grad.squeeze(1).tolist() == [weight * (first + second + 2) for weight in weights]
    metrics = reduce_metrics({f"of_{rank}": float(rank), "ratio_max": float(rank)}, own_pair)
    assert {name: float(value) for name, value in metrics.items()} == {
        f"of_{first}": first,
        f"of_{second}": second,
        "ratio_max": second,
    }
    _host_values_in_pairs(rank, own_pair, first, second)


def _host_values_in_pairs(rank, own_pair, first, second):
    assert sum_over_ranks(np.array([float(rank)]), own_pair).tolist() == [first + second]
    assert max_over_ranks(np.array([rank, -rank]), own_pair).tolist() == [second, -first]
    received = gather_rows_of_ranks(np.arange(rank + 1), own_pair)
    assert rows_in_place(np.array([rank]), [rank // 2], own_pair).tolist() == [first, second]
    assert [rows.tolist() for rows in received] == [list(range(first + 1)), list(range(second + 1))]
    assert (
        broadcast_bytes(b"%d" % rank if rank == second else None, own_pair, 1).tobytes()
        == b"%d" % second
    )
    assert broadcast_array(np.array([rank, rank]), own_pair, 1).tolist() == [second, second]
    parts = {0: b"%d to 0" % rank, 1: b"%d to 1, longer" % rank}
    received = exchange_bytes(parts, [(0, 0), (0, 1), (1, 0), (1, 1)], own_pair)
    wanted = "to 0" if rank == first else "to 1, longer"
    assert [content.tobytes().decode() for content in received.values()] == [
        f"{first} {wanted}",
        f"{second} {wanted}",
    ]
    gathered = gather_bytes(b"%d" % rank, own_pair)  # on the world's rank 0
    assert gathered is None if rank else [content.tobytes() for content in gathered] == [b"0", b"2"]
    alone = gather_bytes(b"x", None)  # each rank's own group; the world's rank 0 gets it
    assert alone is None if rank else [content.tobytes() for content in alone] == [b"x"]
    assert first_failure(f"of {rank}" if rank == second else "", own_pair) == (1, f"of {second}")
    assert first_failure("", own_pair) is None


def test_two_pairs_of_ranks_do_not_meet():
    run_distributed(_in_pairs, 4)


def test_no_group_has_one_rank():
    assert (group_size(None), group_rank(None)) == (1, 0)
