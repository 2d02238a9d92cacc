"""The inputs of the forward step: each micro-batch's shard, copied to the device one micro-batch
ahead.

A pipeline stage gets what it reads: the first one tokens, the last one labels and what the loss
needs. The bounds of the sequences stay on the host, where they are used: reading them back would
synchronise the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.data.packing import (
    CENTERING_FIELDS,
    TEACHER_FIELDS,
    PackedBatch,
    context_parallel_shard,
)
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.router_hooks import router_hooks
from megatron_gspo.parallel.scored_rows import ScoredRows

_FIRST_STAGE = ("tokens", "position_ids")
_LAST_STAGE = ("labels", "support")
POLICY_LOSS = (
    "segment_ids",
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    *TEACHER_FIELDS,
    *CENTERING_FIELDS,
)
VALUE_LOSS = ("loss_mask", "values", "returns")


@dataclass(frozen=True)
class MicroBatchInputs:
    """A micro-batch as one model chunk takes it.

    batch: the context-parallel shard; what the chunk's stage reads is on the device, with int32 in
    place of int64. routes: of the micro-batch, or None. scored: on the last stage, the positions
    that the log-prob head works on.
    """

    batch: PackedBatch
    routes: MicroBatchRoutes | None
    scored: ScoredRows | None


class InputReader:
    """Reads the micro-batches of passes over ``num_microbatches`` each, for every model chunk from
    its own iterator.

    loss: fields that a loss reads. routing: of the pass; None without routes.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        num_microbatches: int,
        loss: Sequence[str] = (),
        routing: Sequence[MicroBatchRoutes] | None = None,
    ) -> None:
        self._groups = groups
        self._count = num_microbatches
        self._loss = tuple(loss)
        self._routing = routing
        self._ready: dict[int, MicroBatchInputs] = {}
        self._read: Counter[int] = Counter()

    def next_inputs(self, batches: Iterator[PackedBatch], model: GPTModel) -> MicroBatchInputs:
        """The next micro-batch of ``model``, an unwrapped chunk. The copy of the one after it has
        been started too, unless that belongs to another pass."""
        chunk = id(model)
        inputs = self._ready.pop(chunk, None)
        if inputs is None:
            inputs = self._start(next(batches), model)
        self._read[chunk] += 1
        is_last_of_pass = self._read[chunk] % self._count == 0
        following = None if is_last_of_pass else next(batches, None)
        if following is not None:
            self._ready[chunk] = self._start(following, model)
        return inputs

    def _start(self, packed: PackedBatch, model: GPTModel) -> MicroBatchInputs:
        groups = self._groups
        shard = context_parallel_shard(packed, groups.cp.rank(), groups.cp.size())
        routes = self._routing[shard.micro_batch] if self._routing is not None else None
        if routes is not None:
            routes.begin_chunk(shard, [hook.layer for hook in router_hooks(model)])
        scored = self._scored_rows(shard, model)
        names: list[str] = []
        if model.pre_process:
            names += _FIRST_STAGE
        if model.post_process:
            names += [*_LAST_STAGE, *self._loss]
        tensors: dict[str, Tensor] = {
            name: value for name in names if (value := getattr(shard, name)) is not None
        }
        moved = copy_to_device(
            tensors | (scored.tensors() if scored is not None else {}), compute_device()
        )
        batch = replace(shard, routed_experts=None, missing_routes=None)
        for name in tensors:
            setattr(batch, name, moved[name])
        return MicroBatchInputs(
            batch=batch,
            routes=routes,
            scored=None if scored is None else scored.with_tensors(moved),
        )

    def _scored_rows(self, shard: PackedBatch, model: GPTModel) -> ScoredRows | None:
        if not model.post_process:
            return None
        # Updates leave out nothing that the passes for old log-probs and values had: a response that
        # has left the loss since (masked, rejected) is packed and scored again, with a gradient of
        # 0, because in low precision the number of rows moves the results of all others.
        tp = self._groups.tp
        rank = tp.rank() if model.config.sequence_parallel else 0
        size = tp.size() if model.config.sequence_parallel else 1
        return ScoredRows.of(shard.response_mask, rank, size)
