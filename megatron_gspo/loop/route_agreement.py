"""Stops a run whose rollout engine returns routes that are valid but not those of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.mcore.routing_replay.gather_results import shared_experts_of_replica
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.parallel.rank_zero import raise_on_every_rank
from megatron_gspo.routing_replay.route_agreement import Levels, level_sums, route_mismatch
from megatron_gspo.routing_replay.routes import RouteError

_FIX = (
    "correct the engine, or train without its routes (routing.replay: r2, routing.compare_rollout:"
    " false)"
)


def check_route_agreement(
    done: Sequence[MicroBatchRoutes], batch: TrainingBatch, *, same_routers: bool
) -> None:
    """Compare the given routes with the live choices of a pass over ``batch``, each pipeline stage
    in its layers.

    Raises ``RouteError`` on every rank for routes that agree too little (`route_agreement`). A
    collective of the world.

    Args:
        done: the routes of the pass, with ``neighbours``.
        same_routers: as in `Levels.of`.
    """
    shares = shared_experts_of_replica(done, batch)
    sums = torch.from_numpy(level_sums(shares)).to(compute_device())
    dist.all_reduce(sums, group=done[0].groups.dp)
    levels = Levels.of(sums.cpu().numpy(), same_routers=same_routers)
    inputs = batch.inputs
    rows = batch.table[inputs.positions]
    names = list(zip(rows["prompt_index"].tolist(), rows["sample_index"].tolist(), strict=True))
    fault = "" if levels is None else route_mismatch(shares, inputs.bounds, names, levels)
    raise_on_every_rank(f"{fault}; {_FIX}" if fault else "", RouteError)
