"""Arrays and bytes between ranks."""

import numpy as np
import torch.distributed as dist

from megatron_gspo.parallel.host_exchange import (
    broadcast_array,
    broadcast_bytes,
    exchange_bytes,
    gather_bytes,
    gather_rows_of_ranks,
    max_over_ranks,
    sum_over_ranks,
)
from tests.support.distributed import run_distributed

ROW = np.dtype([("number", np.int64), ("flag", np.bool_)])


def exchanges(rank: int, world: int) -> dict:
    group = dist.group.WORLD
    values = np.array([rank, -1.5 * rank, np.inf if rank == 1 else 0.0])
    rows = np.array([(10 * rank + i, i % 2) for i in range(2 * rank)], dtype=ROW)  # rank 0 has none
    sent = [f"{rank} to {to}".encode() * (to + rank) for to in range(world)]  # nothing from 0 to 0
    received = exchange_bytes(sent, group)
    assert all(part.flags.writeable for part in received)
    gathered = gather_bytes(str(rank).encode() * rank, group)
    return {
        "sum": sum_over_ranks(values, group).tolist(),
        "max": max_over_ranks(np.array([rank, 5 - rank]), group).tolist(),
        "rows": [part.tolist() for part in gather_rows_of_ranks(rows, group)],
        "received": [part.tobytes().decode() for part in received],
        "told": broadcast_bytes(b"hello" if rank == 2 else None, group, 2).tobytes(),
        "first": broadcast_bytes(b"hi" if rank == 0 else None, group).tobytes(),
        "nothing": broadcast_bytes(b"" if rank == 0 else None, group).tobytes(),
        "none": broadcast_bytes(None, group).tobytes(),
        "array": broadcast_array(values, group, 2).tolist(),
        "empty": broadcast_array(values[:0], group, 2).tolist(),
        "gathered": gathered and [part.tobytes() for part in gathered],
    }


def test_what_ranks_exchange():
    found = run_distributed(exchanges, 3)
    for rank, one in enumerate(found):
        assert one["sum"] == [3, -4.5, np.inf] and one["max"] == [2, 5]
        assert one["rows"] == [[], [(10, False), (11, True)], [(20 + i, bool(i % 2)) for i in range(4)]]
        assert one["received"] == [f"{sender} to {rank}" * (sender + rank) for sender in range(3)]
        assert one["told"] == b"hello" and one["first"] == b"hi" and one["nothing"] == one["none"] == b""
        assert one["array"] == [2, -3, 0] and one["empty"] == []
        assert one["gathered"] == ([b"", b"1", b"22"] if rank == 0 else None)


def test_one_process_needs_no_group():
    values = np.arange(3.0)
    assert sum_over_ranks(values, None) is values and max_over_ranks(values, None) is values
    assert broadcast_array(values, None, 0) is values
    assert exchange_bytes([b"ab"], None)[0].tobytes() == b"ab" and broadcast_bytes(b"ab", None).tobytes() == b"ab"
    assert gather_rows_of_ranks(values, None)[0] is values and gather_bytes(b"x", None)[0].tobytes() == b"x"
