"""Arrays and bytes between ranks."""

import numpy as np
import pytest
import torch.distributed as dist

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
from tests.support.distributed import collectives_so_far, run_distributed

ROW = np.dtype([("number", np.int64), ("flag", np.bool_)])


def exchanges(rank: int, world: int) -> dict:
    group = dist.group.WORLD
    values = np.array([rank, -1.5 * rank, np.inf if rank == 1 else 0.0])
    rows = np.array([(10 * rank + i, i % 2) for i in range(2 * rank)], dtype=ROW)  # rank 0 has none
    links = [(a, b) for a in range(world) for b in range(world) if (a, b) != (2, 1)]
    sent = {
        to: f"{rank} to {to}".encode() * (to + rank) for to in range(world) if (rank, to) != (2, 1)
    }
    received = exchange_bytes(sent, links[::-1], group)  # nothing from 0 to 0
    assert all(content.flags.writeable for content in received.values())
    so_far = collectives_so_far()
    kept = exchange_bytes({rank: b"own"}, [(0, 0), (1, 1), (2, 2)], group)
    assert (
        kept[rank].tobytes() == b"own"
        and kept[rank].flags.writeable
        and exchange_bytes({}, [], group) == {}
    )
    assert collectives_so_far() == so_far, "what stays on its rank is not sent"
    nothing = exchange_bytes({}, [(0, 1), (1, 1)], group)
    assert {i: len(content) for i, content in nothing.items()} == [{}, {0: 0, 1: 0}, {}][rank]
    assert collectives_so_far() == so_far + 1, "a link without a part takes the sizes alone"
    gathered = gather_bytes(str(rank).encode() * rank, group)
    return {
        "sum": sum_over_ranks(values, group).tolist(),
        "max": max_over_ranks(np.array([rank, 5 - rank]), group).tolist(),
        "rows": [content.tolist() for content in gather_rows_of_ranks(rows, group)],
        "in place": in_place(rank, group),
        "received": {sender: content.tobytes().decode() for sender, content in received.items()},
        "told": broadcast_bytes(b"hello" if rank == 2 else None, group, 2).tobytes(),
        "first": broadcast_bytes(b"hi" if rank == 0 else None, group).tobytes(),
        "nothing": broadcast_bytes(b"" if rank == 0 else None, group).tobytes(),
        "none": broadcast_bytes(None, group).tobytes(),
        "array": broadcast_array(values, group, 2).tolist(),
        "empty": broadcast_array(values[:0], group, 2).tolist(),
        "gathered": gathered and [content.tobytes() for content in gathered],
    }


def in_place(rank: int, group: dist.ProcessGroup) -> list:
    """Rows of 16 bytes, whose bits are kept; then positions that are missing or too large."""
    words = np.dtype([("number", np.float64), ("id", np.int32), ("low", np.int32)])
    rows = np.array(
        [(-0.0, -1, 7), (np.nan, 2**31 - 1, -(2**31))][: 3 - rank if rank else 0], dtype=words
    )
    restored = rows_in_place(rows, [2, 0][: len(rows)] if rank == 1 else [1][: len(rows)], group)
    for places in ([rank, 0] if rank else [0, 1], [rank + 1], [rank - 1]):
        with pytest.raises(ValueError, match="samples do not have the positions 0 to"):
            rows_in_place(np.zeros(len(places), dtype=words), places, group)
    return [
        np.signbit(restored["number"]).tolist(),
        np.isnan(restored["number"]).tolist(),
        restored[["id", "low"]].tolist(),
    ]


def test_what_ranks_exchange():
    ranks = run_distributed(exchanges, 3)
    for rank, exchanged in enumerate(ranks):
        assert exchanged["sum"] == [3, -4.5, np.inf] and exchanged["max"] == [2, 5]
        assert exchanged["rows"] == [
            [],
            [(10, False), (11, True)],
            [(20 + i, bool(i % 2)) for i in range(4)],
        ]
        assert exchanged["received"] == {
            sender: f"{sender} to {rank}" * (sender + rank)
            for sender in range(3)
            if (sender, rank) != (2, 1)
        }
        assert exchanged["in place"] == [
            [False, True, True],
            [True, False, False],
            [(2**31 - 1, -(2**31)), (-1, 7), (-1, 7)],
        ]
        assert (
            exchanged["told"] == b"hello"
            and exchanged["first"] == b"hi"
            and exchanged["nothing"] == exchanged["none"] == b""
        )
        assert exchanged["array"] == [2, -3, 0] and exchanged["empty"] == []
        assert exchanged["gathered"] == ([b"", b"1", b"22"] if rank == 0 else None)


def test_one_process_needs_no_group():
    values = np.arange(3.0)
    assert sum_over_ranks(values, None) is values and max_over_ranks(values, None) is values
    assert broadcast_array(values, None, 0) is values
    assert exchange_bytes({0: b"ab"}, [(0, 0)], None)[0].tobytes() == b"ab"
    assert rows_in_place(values[::-1], [2, 1, 0], None).tolist() == [0, 1, 2]
    assert broadcast_bytes(b"ab", None).tobytes() == b"ab"
    assert (
        gather_rows_of_ranks(values, None)[0] is values
        and gather_bytes(b"x", None)[0].tobytes() == b"x"
    )
