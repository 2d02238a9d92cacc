"""Packed micro-batches: sequences laid end to end, and the way back.

Alignment: position t of a packed tensor predicts token t + 1 of the same sequence, so response token j of a
sample sits at position start + prompt_length + j - 1. The last position of a sequence predicts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.schedule import ScheduleReport, padded_length, schedule, schedule_report
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.routes import RouteShape, balanced_routes, route_fault

__all__ = [
    "OPTIONAL_FIELDS",
    "PackedBatch",
    "ScheduleReport",
    "context_parallel_shard",
    "count_trained",
    "pack",
    "padded_length",
    "schedule",
    "schedule_report",
    "unpack",
]

OPTIONAL_FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_probs")


@dataclass
class PackedBatch:
    """One micro-batch of n sequences on T positions (T / cp_size after `context_parallel_shard`).

    tokens, labels, position_ids, segment_ids: [T] int64. Padding belongs to its sequence's segment, 0 .. n-1;
        labels are 0 at padding and at the last position of a sequence.
    loss_mask: [T] float32, 1 where labels[t] is a token that the policy chose.
    advantages, old_log_probs, rollout_log_probs, ref_log_probs: [T] float32, 0 where loss_mask is 0.
    routed_experts: [T, layers, k] of `RouteShape.dtype`, expert ids. A position without a row in its sample (padding,
        the last of a sequence, a missing route) has a balanced one (`balanced_routes`). None: packed without routes.
    missing_routes: [T] bool, where the sample's route isn't known; None where the batch has none.
    cu_seqlens: [n+1] int32, padded bounds, 0 .. T of the whole (never of a shard).
    max_seqlen: longest padded sequence, in tokens.
    num_segments: n.
    num_sequences, num_tokens: sequences with a trained token, and trained tokens, in the GLOBAL mini-batch.
    sample_ids: sample_ids[s] is the position of segment s in the list of samples that was packed.
    micro_batch: which of its rank's micro-batches this is; whoever packs several numbers them.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    loss_mask: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int
    num_segments: int
    num_sequences: int
    num_tokens: int
    sample_ids: tuple[int, ...]
    routed_experts: Tensor | None = None
    missing_routes: Tensor | None = None
    micro_batch: int = 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in self._items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def _items(self) -> list[tuple[str, object]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self)]


def count_trained(samples: Sequence[Sample]) -> tuple[int, int]:
    """(sequences with at least one trained token, trained tokens): sum over ranks for `pack`'s two counts."""
    trained = [int(sample.loss_mask.sum()) for sample in samples]
    return sum(count > 0 for count in trained), sum(trained)


def pack(
    samples: Sequence[Sample],
    *,
    num_sequences: int,
    num_tokens: int,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    optional: Collection[str] | None = None,
    routes: RouteShape | None = None,
) -> PackedBatch:
    """Lay samples end to end.

    sequence_multiple: every sequence is padded to a multiple of it (2 * cp_size under context parallelism).
    total_multiple: the last sequence is padded so that T is a multiple of it (cp_size * tp_size under
        sequence parallelism).
    num_sequences, num_tokens: counts over the global mini-batch (`count_trained`, summed over ranks).
    optional: which of OPTIONAL_FIELDS the batch carries; None takes those that the samples carry.
    routes: the model's sizes where the batch is to carry the samples' routes (`check_routes` them before).

    An empty list gives one dummy segment with loss_mask 0, so that ranks stay in step; it carries every field
    in `optional` (None: all of them) as zeros, and balanced routes. Advantages are 0 where no sample has any (a
    log-prob pass). Raises ValueError where a field is present in some samples only, or asked for and absent, and for
    routes of other sizes.
    """
    multiple = math.lcm(sequence_multiple, total_multiple)
    if not samples:
        wanted = OPTIONAL_FIELDS if optional is None else optional
        return _dummy(multiple, num_sequences, num_tokens, wanted, routes)
    padded = [padded_length(sample.length, sequence_multiple) for sample in samples]
    padded[-1] += padded_length(sum(padded), multiple) - sum(padded)
    bounds = np.concatenate([[0], np.cumsum(padded)])
    tokens, labels = _tokens_and_labels(samples, bounds)
    advantages = _field("advantages", samples, bounds, wanted=None)
    loss_mask = _lay_out([sample.loss_mask for sample in samples], samples, bounds)
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], padded)
    carried: dict[str, Any] = {
        name: _field(name, samples, bounds, wanted=None if optional is None else name in optional)
        for name in OPTIONAL_FIELDS
    }
    routed_experts, missing_routes = _routes(samples, positions, bounds.tolist(), routes)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(np.repeat(np.arange(len(padded)), padded)),
        loss_mask=torch.from_numpy(loss_mask),
        advantages=torch.zeros(len(tokens)) if advantages is None else advantages,
        **carried,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(padded),
        num_segments=len(padded),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        sample_ids=tuple(range(len(samples))),
        routed_experts=routed_experts,
        missing_routes=missing_routes,
    )


def context_parallel_shard(batch: PackedBatch, cp_rank: int, cp_size: int) -> PackedBatch:
    """The positions of a whole batch that `cp_rank` owns (zigzag); cu_seqlens and max_seqlen stay the same.

    Raises ValueError where 2 * cp_size does not divide a sequence: pack with sequence_multiple=2 * cp_size.
    """
    if cp_size == 1:
        return batch
    total = int(batch.cu_seqlens[-1])
    if batch.tokens.shape[0] != total:
        held = batch.tokens.shape[0]
        raise ValueError(f"the batch holds {held} of its {total} positions; shard a whole batch")
    indices = zigzag_indices(batch.cu_seqlens, cp_rank, cp_size).to(batch.tokens.device)
    sharded: dict[str, Any] = {
        name: value[indices]
        for name, value in batch._items()
        if isinstance(value, Tensor) and name != "cu_seqlens"
    }
    return replace(batch, **sharded)


def unpack(values: Tensor, batch: PackedBatch, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Per-token values [T] of a whole batch back to the samples: one [R] array per segment, in segment order.

    samples: the list that was packed; segment s belongs to samples[batch.sample_ids[s]]. Untrained positions
    are returned too. A dummy batch gives []. Raises ValueError where `values` isn't [T].
    """
    total = int(batch.cu_seqlens[-1])
    if values.shape != (total,):
        raise ValueError(f"values has shape {list(values.shape)}; it must be [{total}], the unsharded batch")
    array = values.detach().cpu().numpy()
    out = []
    for index, start in zip(batch.sample_ids, batch.cu_seqlens.tolist(), strict=False):
        sample = samples[index]
        first = start + sample.prompt_length - 1
        out.append(array[first : first + sample.response_length].copy())
    return out


def _tokens_and_labels(samples: Sequence[Sample], bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T] int64 each; 0 where a sequence is padded, and as the label of its last token."""
    tokens, labels = np.zeros((2, int(bounds[-1])), dtype=np.int64)
    for sample, start in zip(samples, bounds.tolist(), strict=False):
        tokens[start : start + sample.length] = sample.tokens
        labels[start : start + sample.length - 1] = sample.tokens[1:]
    return tokens, labels


def _field(name: str, samples: Sequence[Sample], bounds: np.ndarray, *, wanted: bool | None) -> Tensor | None:
    """One per-token field as [T] float32; wanted=None takes it where the samples have it."""
    values = [getattr(sample, name) for sample in samples]
    missing = [i for i, value in enumerate(values) if value is None]
    if wanted is False or (wanted is None and len(missing) == len(values)):
        return None
    if missing:
        sample = samples[missing[0]]
        raise ValueError(
            f"{name} is missing from {len(missing)} of {len(values)} samples (first: sample "
            f"{sample.prompt_index}/{sample.sample_index}); fill it in for all or for none"
        )
    return torch.from_numpy(_lay_out(values, samples, bounds))


def _lay_out(values: Sequence[np.ndarray], samples: Sequence[Sample], bounds: np.ndarray) -> np.ndarray:
    """[R] values per sample to [T] float32; 0 elsewhere and where masked, so that NaN can't leak."""
    out = np.zeros(int(bounds[-1]), dtype=np.float32)
    for value, sample, start in zip(values, samples, bounds.tolist(), strict=False):
        if value.shape != (sample.response_length,):
            raise ValueError(
                f"sample {sample.prompt_index}/{sample.sample_index}: a per-token field has shape "
                f"{list(value.shape)}; the response has {sample.response_length} tokens"
            )
        first = start + sample.prompt_length - 1
        out[first : first + len(value)] = np.where(sample.loss_mask, value, 0)
    return out


def _routes(
    samples: Sequence[Sample], positions: np.ndarray, starts: Sequence[int], shape: RouteShape | None
) -> tuple[Tensor | None, Tensor | None]:
    """`routed_experts` and `missing_routes` of a batch; positions: [T] within their sequence."""
    if shape is None:
        return None, None
    ids = np.empty((len(positions), shape.layers, shape.k), dtype=shape.dtype)
    bare = np.ones(len(positions), dtype=bool)
    missing = np.zeros(len(positions), dtype=bool)
    for sample, start in zip(samples, starts, strict=False):
        rows = slice(start, start + sample.length - 1)
        ids[rows] = _fitting(sample, shape)
        bare[rows] = False
        if sample.missing_routes is not None:
            missing[rows] = sample.missing_routes
    bare |= missing
    ids[bare] = balanced_routes(positions[bare], shape)
    return torch.from_numpy(ids), torch.from_numpy(missing) if missing.any() else None


def _fitting(sample: Sample, shape: RouteShape) -> np.ndarray:
    """The sample's routes, of the model's layers and k, and with ids that `shape.dtype` holds."""
    ids = sample.routed_experts
    fault = "routed_experts is missing; give routes to all samples" if ids is None else route_fault(sample)
    if not fault and ids is not None:
        if ids.shape[1:] != (shape.layers, shape.k):
            fault = f"routed_experts has shape {list(ids.shape)}; it must be [{len(ids)}, {shape.layers}, {shape.k}]"
        elif ids.dtype.itemsize > shape.dtype.itemsize and ids.size and ids.max() >= shape.num_experts:
            fault = f"routed_experts has the expert {ids.max()}; the model has experts 0 to {shape.num_experts - 1}"
    if fault:
        raise ValueError(f"sample {sample.prompt_index}/{sample.sample_index}: {fault}")
    assert ids is not None
    return ids


def _dummy(
    length: int, num_sequences: int, num_tokens: int, optional: Collection[str], routes: RouteShape | None
) -> PackedBatch:
    zeros: dict[str, Any] = {name: torch.zeros(length) if name in optional else None for name in OPTIONAL_FIELDS}
    return PackedBatch(
        tokens=torch.zeros(length, dtype=torch.int64),
        labels=torch.zeros(length, dtype=torch.int64),
        position_ids=torch.arange(length),
        segment_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.zeros(length),
        advantages=torch.zeros(length),
        **zeros,
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        max_seqlen=length,
        num_segments=1,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        sample_ids=(),
        routed_experts=_routes([], np.arange(length), [], routes)[0],
    )
