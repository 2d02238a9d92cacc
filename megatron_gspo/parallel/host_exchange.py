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
    padded = torch.zeros(width, dtype=torch.uint8)  # to the largest number of any rank
    if rows.nbytes:
        padded[: rows.nbytes] = torch.frombuffer(bytearray(rows.tobytes()), dtype=torch.uint8)
    gathered = [torch.empty_like(padded, device=group_device(group)) for _ in range(size)]
    if width:
        dist.all_gather(gathered, padded.to(group_device(group)), group=group)
    return [
        data.cpu().numpy()[: int(count) * rows.dtype.itemsize].view(rows.dtype)
        for data, count in zip(gathered, counts, strict=True)
    ]


def rows_in_place(
    rows: np.ndarray, positions: Sequence[int], group: ProcessGroup | None
) -> np.ndarray:
    """[n] the rows of all ranks by position, on every rank, of a dtype of whole 8-byte words.

    Raises ValueError on every rank unless each position has one row. The ranks sum zeros but for
    their own rows: n rows and 8 bytes for each, whatever the size of the group.

    Args:
        rows: this rank's.
        positions: theirs, of 0 to n - 1.
    """
    [count] = sum_over_ranks(np.array([len(rows)], dtype=np.int64), group).tolist()
    local = np.asarray(positions, dtype=np.int64)
    inside = (local >= 0) & (local < count)
    words = np.zeros((count, 1 + rows.dtype.itemsize // 8), dtype=np.int64)
    np.add.at(words[:, 0], local[inside], 1)
    words[local[inside], 1:] = rows[inside].view(np.int64).reshape(-1, words.shape[1] - 1)
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
    sent = _as_array(payload)
    if group_size(group) == 1:
        return sent
    assert group is not None
    device = group_device(group)
    sender = dist.get_global_rank(group, source)
    size = torch.tensor([len(sent)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=sender, group=group)
    if not int(size):
        return np.empty(0, dtype=np.uint8)
    if group_rank(group) == source:
        dist.broadcast(torch.from_numpy(sent).to(device), src=sender, group=group)
        return sent
    received = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, src=sender, group=group)
    return received.cpu().numpy()


def broadcast_along(
    payload: Bytes | np.ndarray | None, groups: Sequence[ProcessGroup]
) -> np.ndarray:
    """The payload of the first rank of a product of groups as a writable uint8 array, on each of
    its ranks: along one group after the other.

    The others pass None.
    """
    for i, group in enumerate(groups):
        if all(group_rank(later) == 0 for later in groups[i + 1 :]):
            payload = broadcast_bytes(payload, group)
    return _as_array(payload)


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
    payloads: Mapping[int, Bytes],
    links: np.ndarray | Sequence[tuple[int, int]],
    group: ProcessGroup | None,
) -> dict[int, np.ndarray]:
    """payloads[r] goes to rank r; returns what came here by sender, ascending, as writable uint8
    arrays.

    links: [n, 2] every (sender, receiver) of a payload of any rank, the same on every rank; without
    a payload its bytes are empty. A payload of this rank for itself is not sent. The ranks learn the
    sizes by a sum of 8 bytes per link, so that no rank connects to others than those of its own
    payloads.
    """
    this_rank = group_rank(group)
    size = group_size(group)
    pairs = np.unique(np.asarray(links, dtype=np.int64).reshape(-1, 2), axis=0)
    arrived: dict[int, np.ndarray] = {}
    if (pairs == this_rank).all(axis=1).any():
        arrived[this_rank] = _as_array(payloads.get(this_rank))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    is_outgoing = pairs[:, 0] == this_rank
    is_incoming = pairs[:, 1] == this_rank
    receivers = pairs[is_outgoing, 1].tolist()  # ascending
    senders = pairs[is_incoming, 0].tolist()
    assert payloads.keys() <= {this_rank, *receivers}, "a payload without a link"
    lengths = np.zeros(len(pairs), dtype=np.int64)
    lengths[is_outgoing] = [len(payloads.get(receiver, b"")) for receiver in receivers]
    lengths = sum_over_ranks(lengths, group)
    if not lengths.any():
        arrived |= {sender: _as_array(None) for sender in senders}
        return dict(sorted(arrived.items()))
    sent = np.zeros(size, dtype=np.int64)
    received = np.zeros(size, dtype=np.int64)
    sent[receivers] = lengths[is_outgoing]
    received[senders] = lengths[is_incoming]
    outgoing = np.empty(int(sent.sum()), dtype=np.uint8)
    start = 0
    for receiver in receivers:
        payload = payloads.get(receiver, b"")
        outgoing[start : start + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        start += len(payload)
    device = group_device(group)
    incoming = torch.empty(int(received.sum()), dtype=torch.uint8, device=device)
    moved = torch.from_numpy(outgoing).to(device)
    dist.all_to_all_single(incoming, moved, received.tolist(), sent.tolist(), group=group)
    ends = np.cumsum(lengths[is_incoming])
    pieces = np.split(incoming.cpu().numpy(), ends[:-1])
    if senders:  # else there is one piece, which is empty
        arrived |= zip(senders, pieces, strict=True)
    return dict(sorted(arrived.items()))


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
