"""Numbers and bytes of the host over the ranks of a group; group None is one process.

Backends without host memory (NCCL) get device buffers, so callers bound what they pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_gspo.parallel.collectives import group_rank, group_size

Bytes = bytes | bytearray | memoryview


def group_device(group: ProcessGroup | None) -> torch.device:
    """Where a group's backend communicates."""
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over_ranks(values: np.ndarray, group: ProcessGroup | None) -> np.ndarray:
    """The sum of every rank's array [...] of float64 or int64."""
    return _reduce(values, group, dist.ReduceOp.SUM)


def max_over_ranks(values: np.ndarray, group: ProcessGroup | None) -> np.ndarray:
    """The element-wise maximum of every rank's array [...] of float64 or int64."""
    return _reduce(values, group, dist.ReduceOp.MAX)


def _reduce(
    values: np.ndarray, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType
) -> np.ndarray:
    if group_size(group) == 1 or not values.size:
        return values
    moved = torch.from_numpy(np.array(values)).to(group_device(group))
    dist.all_reduce(moved, op=op, group=group)
    return moved.cpu().numpy()


def gather_rows_of_ranks(rows: np.ndarray, group: ProcessGroup | None) -> list[np.ndarray]:
    """Every rank's rows [n_rank] of one dtype (a structured one too), by rank; small arrays."""
    size = group_size(group)
    if size == 1:
        return [rows]
    counts = np.zeros(size, dtype=np.int64)
    counts[group_rank(group)] = len(rows)
    counts = sum_over_ranks(counts, group)
    width = int(counts.max()) * rows.dtype.itemsize
    mine = torch.zeros(width, dtype=torch.uint8)
    mine[: rows.nbytes] = (
        torch.frombuffer(bytearray(rows.tobytes()), dtype=torch.uint8) if rows.nbytes else 0
    )
    everyone = [torch.empty_like(mine, device=group_device(group)) for _ in range(size)]
    if width:
        dist.all_gather(everyone, mine.to(group_device(group)), group=group)
    return [
        part.cpu().numpy()[: int(count) * rows.dtype.itemsize].view(rows.dtype)
        for part, count in zip(everyone, counts, strict=True)
    ]


def rows_in_place(
    rows: np.ndarray, places: Sequence[int], group: ProcessGroup | None
) -> np.ndarray:
    """[n] the rows of all ranks in their places, on every rank, of a dtype of whole 8-byte words.

    rows: this rank's. places: theirs, of 0 to n - 1. Raises ValueError on every rank unless each
    place has one row. The ranks sum zeros but for their own rows: n rows and 8 bytes for each,
    whatever the size of the group.
    """
    [count] = sum_over_ranks(np.array([len(rows)], dtype=np.int64), group).tolist()
    own = np.asarray(places, dtype=np.int64)
    inside = (own >= 0) & (own < count)
    words = np.zeros((count, 1 + rows.dtype.itemsize // 8), dtype=np.int64)
    np.add.at(words[:, 0], own[inside], 1)
    words[own[inside], 1:] = rows[inside].view(np.int64).reshape(-1, words.shape[1] - 1)
    words = sum_over_ranks(words, group)
    if not (words[:, 0] == 1).all():
        raise ValueError(f"{count} samples do not have the positions 0 to {count - 1}")
    return np.ascontiguousarray(words[:, 1:]).view(rows.dtype).reshape(count)


def broadcast_bytes(
    payload: Bytes | np.ndarray | None, group: ProcessGroup | None, source: int = 0
) -> np.ndarray:
    """The payload of the group's rank `source` as a writable uint8 array, on every rank.

    The others pass None.
    """
    mine = _as_array(payload)
    if group_size(group) == 1:
        return mine
    assert group is not None
    device = group_device(group)
    sender = dist.get_global_rank(group, source)
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=sender, group=group)
    if not int(size):
        return np.empty(0, dtype=np.uint8)
    if group_rank(group) == source:
        dist.broadcast(torch.from_numpy(mine).to(device), src=sender, group=group)
        return mine
    received = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, src=sender, group=group)
    return received.cpu().numpy()


def broadcast_array(values: np.ndarray, group: ProcessGroup, source: int) -> np.ndarray:
    """The array of the group's rank `source`, on every rank.

    The others pass one of the same shape and dtype.
    """
    if group_size(group) == 1 or not values.size:
        return values
    moved = torch.from_numpy(np.array(values)).to(group_device(group))
    dist.broadcast(moved, src=dist.get_global_rank(group, source), group=group)
    return moved.cpu().numpy()


def exchange_bytes(
    parts: Mapping[int, Bytes],
    links: np.ndarray | Sequence[tuple[int, int]],
    group: ProcessGroup | None,
) -> dict[int, np.ndarray]:
    """parts[r] goes to rank r; returns what came here by sender, ascending, as writable uint8
    arrays.

    links: [n, 2] every (sender, receiver) of a part of any rank, the same on every rank; without a
    part its bytes are empty. A part of this rank for itself is not sent. The ranks learn the sizes
    by a sum of 8 bytes per link, so that no rank connects to others than those of its own parts.
    """
    me = group_rank(group)
    size = group_size(group)
    pairs = np.unique(np.asarray(links, dtype=np.int64).reshape(-1, 2), axis=0)
    payloads = {me: _as_array(parts.get(me))} if (pairs == me).all(axis=1).any() else {}
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    leaves = pairs[:, 0] == me
    comes = pairs[:, 1] == me
    assert parts.keys() <= {me, *pairs[leaves, 1].tolist()}, "a part without a link"
    lengths = np.zeros(len(pairs), dtype=np.int64)
    lengths[leaves] = [len(parts.get(to, b"")) for to in pairs[leaves, 1].tolist()]
    lengths = sum_over_ranks(lengths, group)
    if not lengths.any():
        return dict(
            sorted(
                (payloads | {rank: _as_array(None) for rank in pairs[comes, 0].tolist()}).items()
            )
        )
    sent = np.zeros(size, dtype=np.int64)
    received = np.zeros(size, dtype=np.int64)
    sent[pairs[leaves, 1]], received[pairs[comes, 0]] = lengths[leaves], lengths[comes]
    outgoing = np.empty(int(sent.sum()), dtype=np.uint8)
    at = 0
    for to in pairs[leaves, 1].tolist():  # ascending
        part = parts.get(to, b"")
        outgoing[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
        at += len(part)
    device = group_device(group)
    incoming = torch.empty(int(received.sum()), dtype=torch.uint8, device=device)
    moved = torch.from_numpy(outgoing).to(device)
    dist.all_to_all_single(incoming, moved, received.tolist(), sent.tolist(), group=group)
    ends = np.cumsum(lengths[comes])
    payloads |= zip(
        pairs[comes, 0].tolist(), np.split(incoming.cpu().numpy(), ends[:-1]), strict=False
    )
    return dict(sorted(payloads.items()))


def gather_bytes(payload: Bytes, group: ProcessGroup | None) -> list[np.ndarray] | None:
    """Every rank's payload by rank, on the world's rank 0; None elsewhere. Groups without that
    rank do nothing.
    """
    if group_size(group) == 1:
        return [_as_array(payload)] if not dist.is_initialized() or dist.get_rank() == 0 else None
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return None
    target = ranks.index(0)
    received = exchange_bytes(
        {target: payload}, [(rank, target) for rank in range(len(ranks))], group
    )
    return list(received.values()) if group_rank(group) == target else None


def _as_array(payload: Bytes | np.ndarray | None) -> np.ndarray:
    if payload is None:
        return np.empty(0, dtype=np.uint8)
    if isinstance(payload, np.ndarray):
        return payload
    return np.frombuffer(
        payload if isinstance(payload, bytearray) else bytearray(payload), dtype=np.uint8
    )
