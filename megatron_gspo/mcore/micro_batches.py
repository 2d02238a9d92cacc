"""This rank's packed micro-batches of a mini-batch, and per-token results back to the samples of
its replica.

A replica is the ranks of one model: those that differ in tensor, context and pipeline rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.config import TrainingConfig
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan, PackingRules, plan_micro_batches
from megatron_gspo.data.packing import PackedBatch, PackLayout, pack_responses, packed_rows
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.routes import RouteShape


def packing_rules(
    training: TrainingConfig, config: TransformerConfig, groups: ProcessGroups
) -> PackingRules:
    """How a model with this config packs.

    Micro-batches have one length where their sizes must agree between ranks: pipeline stages and
    the allgather dispatcher.
    """
    cp = groups.cp.size()
    sequence_multiple = 2 * cp if cp > 1 else 1
    return PackingRules(
        replicas=groups.dp.size(),
        max_tokens=training.max_tokens_per_micro_batch,
        micro_batch_size=training.micro_batch_size,
        sequence_multiple=sequence_multiple,
        total_multiple=sequence_multiple * (groups.tp.size() if config.sequence_parallel else 1),
        count_multiple=groups.pp.size() if config.virtual_pipeline_model_parallel_size else 1,
        same_length=groups.pp.size() > 1 or config.moe_token_dispatcher_type == "allgather",
    )


class PackedBatches(Sequence[PackedBatch]):
    """Micro-batches that are packed on access, so that routes are held once and not packed too."""

    def __init__(
        self,
        batch: TrainingBatch,
        plan: MicroBatchPlan,
        replica: int,
        optional: Sequence[str] | None,
        routes: RouteShape | None,
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._positions = plan.micro_batches[replica]
        self._optional = optional
        self._routes = routes
        trained = batch.table["trained"]
        self._counts = (
            max(int(np.count_nonzero(trained)), 1),
            max(int(trained.sum(dtype=np.int64)), 1),
        )

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[PackedBatch]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedBatch]: ...

    def __getitem__(self, index: int | slice) -> PackedBatch | Sequence[PackedBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        packed = pack_responses(
            self._batch,
            self._positions[index],
            num_sequences=self._counts[0],
            num_tokens=self._counts[1],
            sequence_multiple=self._plan.sequence_multiple,
            total_multiple=self._plan.total_multiples[index],
            optional=self._optional,
            routes=self._routes,
        )
        packed.micro_batch = index
        return packed


@dataclass(frozen=True)
class MicroBatches:
    """One rank's share of a mini-batch. Every data-parallel rank has the same number of
    micro-batches."""

    batches: Sequence[PackedBatch]
    seq_length: int
    """Tokens of the longest micro-batch of any rank, for Megatron's pipeline schedule."""

    real_tokens: int
    """Tokens of the whole mini-batch over all ranks, without padding."""

    packed_tokens: int
    """The same with padding."""

    layouts: Sequence[PackLayout] = ()
    """The layouts of ``batches``."""

    several_lengths: bool = False
    """Whether a pipeline's stages don't know a micro-batch's length from ``seq_length``."""


def planned_micro_batches(
    batch: TrainingBatch,
    plan: MicroBatchPlan,
    groups: ProcessGroups,
    *,
    optional: Sequence[str] | None = None,
    routes: RouteShape | None = None,
) -> MicroBatches:
    """This rank's micro-batches of a global mini-batch. ``optional``, ``routes``: as in ``pack``;
    only ranks with the loss have optional fields."""
    replica = groups.dp.rank()
    layouts = []
    for number, (positions, multiple) in enumerate(
        zip(plan.micro_batches[replica], plan.total_multiples, strict=True)
    ):
        bounds, rows = packed_rows(batch, positions, plan.sequence_multiple, multiple)
        layouts.append(PackLayout(torch.from_numpy(bounds.astype(np.int32)), rows, number))
    packed = PackedBatches(batch, plan, replica, optional if batch.has_loss else (), routes)
    return MicroBatches(
        packed,
        plan.seq_length,
        plan.real_tokens,
        plan.packed_tokens,
        layouts,
        several_lengths=len(set(plan.total_multiples)) > 1,
    )


def micro_batches(
    samples: Sequence[Sample],
    config: TransformerConfig,
    groups: ProcessGroups,
    *,
    max_tokens: int,
    micro_batch_size: int | None = None,
    optional: Sequence[str] | None = None,
    routes: RouteShape | None = None,
) -> MicroBatches:
    """This rank's micro-batches of a global mini-batch that every rank passes: for loops of your
    own.

    ``config``: of the model. ``max_tokens`` bounds a packed micro-batch,
    ``micro_batch_size`` fixes the number of its sequences instead. ``optional``, ``routes``: as in
    ``pack``.
    """
    training = TrainingConfig(
        steps=1,
        global_batch_size=1,
        max_tokens_per_micro_batch=max_tokens,
        micro_batch_size=micro_batch_size,
    )
    batch = TrainingBatch.of(samples)
    plan = plan_of(batch, training, config, groups)
    return planned_micro_batches(batch, plan, groups, optional=optional, routes=routes)


def plan_of(
    batch: TrainingBatch, training: TrainingConfig, config: TransformerConfig, groups: ProcessGroups
) -> MicroBatchPlan:
    """The plan of samples that every rank holds."""
    rules = packing_rules(training, config, groups)
    return plan_micro_batches(batch.packing_lengths(rules.sequence_multiple), rules)


def values_of_replica(
    values: Sequence[Tensor],
    layouts: Sequence[PackLayout],
    batch: TrainingBatch,
    groups: ProcessGroups,
    *,
    shape: tuple[int, ...] = (),
) -> np.ndarray:
    """Per-token results of this replica as a column of ``batch.responses``, ``[T, *shape]`` float32;
    0 where other replicas train a response.

    ``values``: one ``[t, *shape]`` tensor per micro-batch, of this rank's shards, on the last
    pipeline stage; empty elsewhere. One sum over the context ranks, each token being set by exactly
    one, and one broadcast to the other stages if those have the responses too.
    """
    if not batch.has_loss:
        return np.zeros((0, *shape), dtype=np.float32)
    rows = [row for layout in layouts for row in layout.rows]
    packed_order = [row.sample for row in rows if row.offset == 0]
    lengths = batch.table["response_length"][packed_order].astype(np.int64)
    if values:
        # The only one without samples.
        responses = [torch.zeros((0, *shape), device=compute_device())]
        for shard, layout in zip(values, layouts, strict=True):
            responses += _response_values(shard.float(), layout, batch.table, groups)
        flat = torch.cat(responses)
        if groups.cp.size() > 1 and len(flat):
            dist.all_reduce(flat, group=groups.cp)
    else:
        flat = torch.zeros((int(lengths.sum()), *shape), device=compute_device())
    if groups.pp.size() > 1 and batch.pipeline is None and len(flat):
        dist.broadcast(flat, src=groups.last_stage_rank, group=groups.pp)
    column = np.zeros((batch.responses.num_tokens, *shape), dtype=np.float32)
    views = batch.responses.split(column)
    ends = np.cumsum(lengths)[:-1]
    packed_values = np.split(flat.cpu().numpy(), ends)
    for position, response_values in zip(packed_order, packed_values, strict=False):
        views[position][:] = response_values
    return column


def _response_values(
    values: Tensor, layout: PackLayout, table: np.ndarray, groups: ProcessGroups
) -> list[Tensor]:
    """The values ``[t, ...]`` of a shard where each sample's response is predicted, sample after
    sample; 0 at what other shards have."""
    packed = values
    if groups.cp.size() > 1:
        owned = zigzag_indices(layout.cu_seqlens, groups.cp.rank(), groups.cp.size())
        packed = values.new_zeros(int(layout.cu_seqlens[-1]), *values.shape[1:])
        packed[copy_to_device({"owned": owned}, values.device)["owned"].long()] = values
    responses = []
    for row in layout.rows:
        if row.offset:  # its first token, which nothing predicts
            responses.append(packed.new_zeros(1, *packed.shape[1:]))
        predicted = row.predicted(int(table["prompt_length"][row.sample]))
        responses.append(packed[predicted.packed])
    return responses


def values_everywhere(column: np.ndarray, groups: ProcessGroups) -> np.ndarray:
    """`values_of_replica` of a batch that every rank has, on every rank: one sum over the replicas.
    For few samples.
    """
    values = torch.from_numpy(column).to(compute_device())
    dist.all_reduce(values, group=groups.dp)
    return values.cpu().numpy()
