"""Routing replay in one step of the loop: options of each pass, checks, and what was recorded and measured.

| ``routing.replay`` | old log-probs                                 | updates                             |
| ------------------ | --------------------------------------------- | ----------------------------------- |
| none               | live; recorded for some sequences (metrics)   | live; compared with those (metrics) |
| r2                 | live; recorded                                | the recorded routes                 |
| r3                 | the rollout's routes, or live                 | the rollout's routes                |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.routing_replay.gather_results import gather_flips, gather_routes, routing_stats
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, ReplayOptions
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.routing_replay.routes import RouteShape, check_routes
from megatron_gspo.routing_replay.step_metrics import StepRouting
from megatron_gspo.tracking.run_directory import spread


def add_update(found: StepRouting, done: Sequence[MicroBatchRoutes] | None, batch: Sequence[Sample], timers: Timers, *,
               flips: bool) -> None:  # fmt: skip
    """Add what the routers did in an update with ``batch``; ``flips`` asks for those of each token. A collective."""
    if done is not None:
        with timers("routing"):
            found.updates.append(routing_stats(done))
            found.flips = gather_flips(done, batch) if flips and done[0].options.compare else None
            found.bytes_moved += sum(routes.bytes_moved for routes in done)


def accept_routes(run: Run, samples: Sequence[Sample], routing: StepRouting) -> None:
    """Check the routes that the rollout engine gave; ``RouteError`` naming the sample where they can't be used.

    Missing routes are allowed where routes are only compared.
    """
    config = run.config.routing
    if config.needs_rollout_routes and run.route_shape is not None:
        missing = config.missing_routes if config.replay == "r3" else "live"
        routing.missing_routes = check_routes(samples, run.route_shape, missing=missing)


def old_policy_options(run: Run) -> ReplayOptions | None:
    """What the routers do while the old policy's log-probs are computed."""
    routing, shape = run.config.routing, run.route_shape
    if not _is_wanted(run):
        return None
    return ReplayOptions(
        shape,
        replay=routing.replay == "r3" and routing.replay_old_log_probs,
        record=routing.replay == "r2" or routing.metrics,
        compare=routing.metrics and routing.needs_rollout_routes,
        entropy=routing.metrics,
        storage=routing.storage,
    )


def update_options(run: Run) -> ReplayOptions | None:
    """What the routers do in an update."""
    routing, shape = run.config.routing, run.route_shape
    if not _is_wanted(run):
        return None
    return ReplayOptions(shape, replay=routing.replay != "none", compare=routing.metrics, storage=routing.storage)


def _is_wanted(run: Run) -> bool:
    routing = run.config.routing
    return run.route_shape is not None and run.objective.has_ratio and (routing.replay != "none" or routing.metrics)


def note_old_policy(run: Run, samples: list[Sample], scored: Sequence[Sample],
                    done: Sequence[MicroBatchRoutes] | None, found: StepRouting, timers: Timers) -> None:
    """Store the routes that a pass over ``scored`` (all samples, or some) recorded with the samples, where the updates
    need them, and keep its statistics."""
    config = run.config.routing
    if done is not None:
        with timers("routing"):
            if config.metrics:
                found.old = routing_stats(done)
            if config.replay != "r3":
                wanted = list(range(len(scored))) if config.replay == "r2" else _some(run, scored)
                recorded, exchanged = gather_routes(done, scored, wanted)
                _clear_routes(samples, done[0].options.shape)
                _attach(scored, wanted, recorded)
                found.bytes_moved += exchanged
            found.bytes_moved += sum(routes.bytes_moved for routes in done)
    found.bytes_stored = sum(stored_bytes(sample) for sample in samples)


def sample_old_policy(run: Run, samples: list[Sample], found: StepRouting, timers: Timers) -> None:
    """Without a pass of the old policy: a pass over some sequences, for the statistics only."""
    options = old_policy_options(run) if run.config.routing.metrics else None
    some = [samples[i] for i in _some(run, samples)]
    done = None
    if options is not None:
        temperature = run.config.rollout.temperature
        with timers("routing"):
            done = compute_log_probs(run.policy, some, run.batching, temperature=temperature, routing=options).routing
    note_old_policy(run, samples, some, done, found, timers)


def stored_bytes(sample: Sample) -> int:
    """Memory of a sample's routes; a placeholder for missing routes takes none."""
    routes = sample.routed_experts
    return 0 if routes is None or 0 in routes.strides else routes.nbytes


def _some(run: Run, samples: Sequence[Sample]) -> list[int]:
    return spread(range(len(samples)), run.config.routing.metric_sequences)


def _attach(samples: Sequence[Sample], indices: Sequence[int], routes: Sequence[np.ndarray]) -> None:
    for index, ids in zip(indices, routes, strict=True):
        samples[index].routed_experts, samples[index].missing_routes = ids, None


def _clear_routes(samples: Sequence[Sample], shape: RouteShape) -> None:
    """Mark every route of the samples as missing, without allocating memory for them."""
    for sample in samples:
        rows = sample.length - 1
        nothing = np.zeros((), dtype=shape.dtype)
        sample.routed_experts = np.broadcast_to(nothing, (rows, shape.layers, shape.k))
        sample.missing_routes = np.broadcast_to(np.True_, (rows,))
