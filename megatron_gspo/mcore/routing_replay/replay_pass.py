"""One pass over a mini-batch with its routes: each micro-batch gets its table on every chunk, and it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch
from megatron_gspo.mcore.process_groups import Groups, compute_device
from megatron_gspo.mcore.routing_replay.router_hooks import RouteTable, RoutingError, gates
from megatron_gspo.routing_replay.routes import RouteShape


@dataclass(frozen=True)
class RoutingTask:
    """What the routers do in a pass.

    shape: sizes of the routes. replay: use the ``routed_experts`` of the batches. record: keep the live choices.
    compare: count where a live choice differs from the batches' routes. describe: take the router's entropy.
    storage: where ids wait, ``device`` or ``host`` (pinned there, copied in the background).
    """

    shape: RouteShape
    replay: bool = False
    record: bool = False
    compare: bool = False
    describe: bool = False
    storage: str = "device"

    @property
    def needs_routes(self) -> bool:
        """Whether the batches must carry routes."""
        return self.replay or self.compare


@dataclass
class RoutingPass:
    """A task on one rank: the tables by (index of the chunk's first MoE layer, micro-batch).

    layers: the MoE layers of each chunk, as positions among those of the model. batches: the micro-batches, whole.
    compared: by micro-batch, whether the route of any trained token is known to compare with. bytes_moved: by this
    rank, between host and device and to other ranks.
    """

    task: RoutingTask
    groups: Groups
    sequence_parallel: bool
    batches: Sequence[PackedBatch]
    tables: dict[tuple[int, int], RouteTable] = field(default_factory=dict)
    layers: dict[int, list[int]] = field(default_factory=dict)
    compared: list[bool] = field(default_factory=list)
    bytes_moved: int = 0

    def __post_init__(self) -> None:
        self.compared = [self.task.compare and _has_known_route(batch) for batch in self.batches]
        for batch in self.batches if torch.cuda.is_available() else ():
            for name in ("routed_experts", "route_holes"):
                if (ids := getattr(batch, name)) is not None:
                    on_device = self.task.storage == "device"
                    setattr(batch, name, self._to_device(ids) if on_device else ids.pin_memory())

    def table(self, shard: PackedBatch, model: Any) -> RouteTable | None:
        """The table of a micro-batch's context-parallel shard on one unwrapped model chunk; None for one without MoE
        layers."""
        found = gates(model)
        if not found:
            return None
        key, task = (found[0].index, shard.micro_batch), self.task
        if key in self.tables:
            raise RoutingError(f"micro-batch {shard.micro_batch} went through the same layers twice in one pass")
        mine = self.rows(shard.tokens.shape[0])
        given, holes = shard.routed_experts, shard.route_holes
        if given is None and task.needs_routes:
            raise RoutingError(f"micro-batch {shard.micro_batch} carries no routes; pack it with routes")
        layers = self.layers[key[0]] = [gate.index for gate in found]
        self.tables[key] = RouteTable(
            dtype=task.shape.torch_dtype,
            weight=shard.loss_mask[mine].to(compute_device(), non_blocking=True),
            given=None if given is None else self._to_device(given[mine][:, layers[0] : layers[-1] + 1]),
            holes=None if holes is None else self._to_device(holes[mine]),
            replay=task.replay,
            record=task.record,
            compare=self.compared[shard.micro_batch],
            describe=task.describe,
            store=_to_host if task.storage == "host" else _keep,
        )
        return self.tables[key]

    def rows(self, count: int) -> slice:
        """The tokens of a shard of ``count`` that this rank's routers see: its part under sequence parallelism."""
        if not self.sequence_parallel:
            return slice(0, count)
        part = count // self.groups.tp.size()
        return slice(self.groups.tp.rank() * part, (self.groups.tp.rank() + 1) * part)

    @property
    def counts(self) -> bool:
        """Whether no other rank of the tensor-parallel group stands for the same tokens before this one."""
        return self.sequence_parallel or self.groups.tp.rank() == 0

    def check(self, *, forward_only: bool) -> None:
        """Raise ``RoutingError`` unless every router asked for each micro-batch exactly once: in a training pass with a
        gradient (and before that once without, where activations are recomputed), else without."""
        for (chunk, micro_batch), table in self.tables.items():
            for layer, index in enumerate(self.layers[chunk]):
                without, with_gradient = table.uses[layer, False], table.uses[layer, True]
                right = (without, with_gradient) == (1, 0) if forward_only else with_gradient == 1 and without <= 1
                if not right:
                    raise RoutingError(
                        f"the router of MoE layer {index} took its routes of micro-batch {micro_batch} {with_gradient} "
                        f"times with and {without} times without a gradient; once was to be expected"
                    )

    def _to_device(self, ids: Tensor) -> Tensor:
        moved = ids.to(compute_device(), non_blocking=True)
        self.bytes_moved += 0 if moved is ids else ids.numel() * ids.element_size()
        return moved


def _has_known_route(batch: PackedBatch) -> bool:
    trained = batch.loss_mask > 0
    return bool((trained if batch.route_holes is None else trained & ~batch.route_holes).any())


def _keep(ids: Tensor) -> Tensor:
    return ids


def _to_host(ids: Tensor) -> Tensor:
    """A copy in pinned memory, made while the device goes on; synchronise before reading it."""
    if ids.device.type == "cpu":
        return ids
    return torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
