"""Split a mini-batch into this rank's packed micro-batches, and map per-token results back to the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch, count_trained, pack
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.schedule import padded_length, schedule
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.routes import RouteShape


@dataclass(frozen=True)
class MicroBatches:
    """One rank's share of a mini-batch. Every data-parallel rank has the same number of micro-batches.

    ``seq_length``: tokens of the longest micro-batch of any rank, for Megatron's pipeline schedule.
    ``real_tokens`` and ``packed_tokens`` count the whole mini-batch over all ranks, without and with padding.
    """

    batches: list[PackedBatch]
    seq_length: int
    real_tokens: int
    packed_tokens: int


def micro_batches(samples: Sequence[Sample], config: Any, groups: ProcessGroups, *, max_tokens: int,
                  micro_batch_size: int | None = None, optional: Sequence[str] | None = None,
                  routes: RouteShape | None = None) -> MicroBatches:
    """Schedule and pack a global mini-batch; every rank passes the same samples and gets its own part.

    ``config`` is the model's ``TransformerConfig``. ``max_tokens`` bounds a packed micro-batch, ``micro_batch_size``
    fixes the number of its sequences instead. ``optional``, ``routes``: as in ``pack``. Micro-batches are
    padded to one length where their sizes must agree between ranks: pipeline stages and the allgather dispatcher.
    """
    cp = groups.cp.size()
    sequence_multiple = 2 * cp if cp > 1 else 1
    multiple = sequence_multiple * (groups.tp.size() if config.sequence_parallel else 1)
    lengths = [padded_length(sample.length, sequence_multiple) for sample in samples]
    step = groups.pp.size() if config.virtual_pipeline_model_parallel_size else 1
    if micro_batch_size is None:
        budget = max_tokens - max_tokens % multiple
        plan = schedule(lengths, num_ranks=groups.dp.size(), max_tokens=budget, multiple_of=step)
    else:
        plan = _fixed(len(samples), groups.dp.size(), micro_batch_size, step)
    totals = [[max(padded_length(sum(lengths[i] for i in rows), multiple), multiple) for rows in rank] for rank in plan]
    longest = max(max(row) for row in totals)
    same_length = groups.pp.size() > 1 or config.moe_token_dispatcher_type == "allgather"
    sequences, tokens = count_trained(samples)
    batches = [
        _number(pack([samples[i] for i in rows], num_sequences=max(sequences, 1), num_tokens=max(tokens, 1),
                     sequence_multiple=sequence_multiple, total_multiple=longest if same_length else multiple,
                     optional=optional, routes=routes), index, rows)
        for index, rows in enumerate(plan[groups.dp.rank()])
    ]
    packed = longest * sum(map(len, totals)) if same_length else sum(map(sum, totals))
    return MicroBatches(batches, longest, sum(sample.length for sample in samples), packed)


def _fixed(count: int, num_ranks: int, size: int, multiple_of: int) -> list[list[list[int]]]:
    """``size`` sequences per micro-batch, assigned to ranks round-robin; empty micro-batches come last."""
    rows = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    per_rank = padded_length(max(-(-len(rows) // num_ranks), 1), multiple_of)
    rows += [[] for _ in range(per_rank * num_ranks - len(rows))]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def _number(batch: PackedBatch, index: int, rows: Sequence[int]) -> PackedBatch:
    batch.micro_batch, batch.sample_ids = index, tuple(rows)
    return batch


def response_positions(batch: PackedBatch, samples: Sequence[Sample], offsets: np.ndarray) -> Tensor:
    """The index of each packed position's label in the concatenated responses, or -1; int64 ``[T]``.

    ``offsets[i]`` is where the response of sample ``i`` starts.
    """
    positions = torch.full((int(batch.cu_seqlens[-1]),), -1, dtype=torch.long)
    for index, start in zip(batch.sample_ids, batch.cu_seqlens.tolist(), strict=False):
        first = start + samples[index].prompt_length - 1
        size = samples[index].response_length
        positions[first : first + size] = torch.arange(offsets[index], offsets[index] + size)
    return positions


def collect_values(values: Sequence[Tensor], batches: Sequence[PackedBatch], samples: Sequence[Sample],
                   groups: ProcessGroups) -> list[np.ndarray]:
    """Map per-token results of this rank's shards to one ``[R]`` float32 array per sample, on every rank.

    ``values``: one ``[t]`` tensor per micro-batch on the last pipeline stage, empty elsewhere. One all-reduce over the
    world: exactly one rank sets each token, so the sum is exact.
    """
    offsets = np.concatenate([[0], np.cumsum([sample.response_length for sample in samples])]).astype(np.int64)
    flat = torch.zeros(int(offsets[-1]), device=compute_device())
    if values and groups.tp.rank() == 0:
        place = groups.cp.rank(), groups.cp.size()
        targets = torch.cat([
            response_positions(batch, samples, offsets)[zigzag_indices(batch.cu_seqlens, *place)] for batch in batches
        ])  # fmt: skip
        kept = (targets >= 0).nonzero().squeeze(1)
        moved = copy_to_device({"kept": kept, "targets": targets[kept]}, flat.device)
        flat[moved["targets"].long()] = torch.cat(list(values)).index_select(0, moved["kept"]).float()
    dist.all_reduce(flat)
    return [part.copy() for part in np.split(flat.cpu().numpy(), offsets[1:-1])]
