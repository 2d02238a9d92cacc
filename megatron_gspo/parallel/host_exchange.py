"""Numbers and bytes of the host over the ranks of a group; group None is one process.

Backends without host memory (NCCL) get device buffers, so callers bound what they pass.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def _reduce(values: np.ndarray, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> np.ndarray:
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
    mine[: rows.nbytes] = torch.frombuffer(bytearray(rows.tobytes()), dtype=torch.uint8) if rows.nbytes else 0
    everyone = [torch.empty_like(mine, device=group_device(group)) for _ in range(size)]
    if width:
        dist.all_gather(everyone, mine.to(group_device(group)), group=group)
    return [
        part.cpu().numpy()[: int(count) * rows.dtype.itemsize].view(rows.dtype)
        for part, count in zip(everyone, counts, strict=True)
    ]


def broadcast_bytes(payload: Bytes | np.ndarray | None, group: ProcessGroup | None, source: int = 0) -> np.ndarray:
    """The payload of the group's rank `source` as a writable uint8 array, on every rank. The others pass None."""
    mine = _as_array(payload)
    if group_size(group) == 1:
        return mine
    assert group is not None
    device, sender = group_device(group), dist.get_global_rank(group, source)
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
    """The array of the group's rank `source`, on every rank. The others pass one of the same shape and dtype."""
    if group_size(group) == 1 or not values.size:
        return values
    moved = torch.from_numpy(np.array(values)).to(group_device(group))
    dist.broadcast(moved, src=dist.get_global_rank(group, source), group=group)
    return moved.cpu().numpy()


def exchange_bytes(parts: Sequence[Bytes], group: ProcessGroup | None) -> list[np.ndarray]:
    """parts[r] goes to rank r; returns what each rank sent here, by rank: views into one writable uint8 array."""
    if group_size(group) == 1:
        return [_as_array(parts[0])]
    device = group_device(group)
    sent = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    outgoing = np.empty(int(sent.sum()), dtype=np.uint8)
    at = 0
    for part in parts:
        outgoing[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
        at += len(part)
    sizes = received.tolist()
    incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, torch.from_numpy(outgoing).to(device), sizes, sent.tolist(), group=group)
    return np.split(incoming.cpu().numpy(), np.cumsum(sizes)[:-1])


def gather_bytes(payload: Bytes, group: ProcessGroup | None) -> list[np.ndarray] | None:
    """Every rank's payload by rank, on the world's rank 0; None elsewhere. Groups without that rank do nothing."""
    if group_size(group) == 1:
        return [_as_array(payload)] if not dist.is_initialized() or dist.get_rank() == 0 else None
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return None
    target = ranks.index(0)
    found = exchange_bytes([payload if rank == target else b"" for rank in range(len(ranks))], group)
    return found if group_rank(group) == target else None


def _as_array(payload: Bytes | np.ndarray | None) -> np.ndarray:
    if payload is None:
        return np.empty(0, dtype=np.uint8)
    if isinstance(payload, np.ndarray):
        return payload
    return np.frombuffer(payload if isinstance(payload, bytearray) else bytearray(payload), dtype=np.uint8)
