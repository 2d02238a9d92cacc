"""Routes through one step of the loop: asked for, checked, recorded, replayed, and the figures about them.

| ``routing.replay`` | old log-probs                                 | updates                             |
| ------------------ | --------------------------------------------- | ----------------------------------- |
| none               | live; recorded for some sequences (metrics)   | live; compared with those (metrics) |
| r2                 | live; recorded                                | the recorded routes                 |
| r3                 | the rollout's routes, or live                 | the rollout's routes                |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.routing_replay.replay_pass import RoutingPass, RoutingTask
from megatron_gspo.mcore.routing_replay.replay_results import (
    RoutingFigures,
    collect_flips,
    collect_routes,
    routing_figures,
)
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.routing_replay.routes import RouteShape, check_routes
from megatron_gspo.tracking.run_directory import spread


@dataclass
class StepRouting:
    """What a step found out about routes; the same on every rank, but for the bytes.

    old: figures of the old policy's pass, in which choices are compared with the rollout engine's. updates: of each
    update, compared with the routes that the samples carry. flips: of the last update, by sample and response token
    (``collect_flips``), where asked for. moved: bytes that this rank sent or copied.
    """

    old: RoutingFigures | None = None
    flips: list[np.ndarray] | None = None
    updates: list[RoutingFigures] = field(default_factory=list)
    holes: int = 0
    stored: int = 0
    moved: int = 0

    def add_update(self, done: RoutingPass | None, batch: Sequence[Sample], timers: Timers, *, flips: bool) -> None:
        """What the routers did in an update with ``batch``; ``flips`` asks for those of each token. A collective."""
        if done is not None:
            with timers("routing"):
                self.updates.append(routing_figures(done))
                self.flips = collect_flips(done, batch) if flips and done.task.compare else None
                self.moved += done.bytes_moved

    def metrics(self) -> dict[str, float]:
        """The scalars of ``metrics.jsonl``; see docs/metrics.md."""
        found: dict[str, float] = {}
        updates = [figures for figures in self.updates if figures.compared]
        if updates:
            found["routing/flip_rate"] = float(np.mean([figures.flip_rate for figures in updates]))
            found["routing/flipped_tokens"] = float(np.mean([figures.flipped_tokens for figures in updates]))
        if self.old is not None:
            if self.old.compared:
                found["routing/rollout_flip_rate"] = float(np.mean(self.old.flip_rate))
                found["routing/rollout_flipped_tokens"] = self.old.flipped_tokens
            if self.old.entropy is not None:
                found["routing/entropy"] = float(self.old.entropy.mean())
            if self.old.load is not None:
                found["routing/load_imbalance"] = float((self.old.load.max(1) / self.old.load.mean(1)).mean())
        if found or self.stored:
            found |= {"routing/replay_bytes": float(self.stored), "routing/bytes_moved": float(self.moved)}
        return found | ({"routing/holes": float(self.holes)} if self.holes else {})

    def by_layer(self) -> dict[str, Any]:
        """The record of ``routing.jsonl``: lists by MoE layer, null where nothing was measured."""
        updates = [figures.flip_rate for figures in self.updates if figures.compared]
        old = self.old
        return {
            "flip_rate": np.mean(updates, axis=0).tolist() if updates else None,
            "rollout_flip_rate": old.flip_rate.tolist() if old is not None and old.compared else None,
            "entropy": old.entropy.tolist() if old is not None and old.entropy is not None else None,
            "load": old.load.tolist() if old is not None and old.load is not None else None,
        }


def accept_routes(run: Run, samples: Sequence[Sample], routing: StepRouting) -> None:
    """Check the routes that the rollout engine gave; ``RouteError`` naming the sample where they can't be used.

    Where they are only compared with, a hole does no harm.
    """
    config = run.config.routing
    if config.needs_rollout_routes and run.route_shape is not None:
        holes = config.holes if config.replay == "r3" else "live"
        routing.holes = check_routes(samples, run.route_shape, holes=holes)


def old_policy_task(run: Run) -> RoutingTask | None:
    """What the routers do while the old policy's log-probs are computed."""
    routing, shape = run.config.routing, run.route_shape
    if not _is_wanted(run):
        return None
    return RoutingTask(
        shape,
        replay=routing.replay == "r3" and routing.replay_old_log_probs,
        record=routing.replay == "r2" or routing.metrics,
        compare=routing.metrics and routing.needs_rollout_routes,
        describe=routing.metrics,
        storage=routing.storage,
    )


def update_task(run: Run) -> RoutingTask | None:
    """What the routers do in an update."""
    routing, shape = run.config.routing, run.route_shape
    if not _is_wanted(run):
        return None
    return RoutingTask(shape, replay=routing.replay != "none", compare=routing.metrics, storage=routing.storage)


def _is_wanted(run: Run) -> bool:
    routing = run.config.routing
    return run.route_shape is not None and run.objective.has_ratio and (routing.replay != "none" or routing.metrics)


def note_old_policy(run: Run, samples: list[Sample], scored: Sequence[Sample], done: RoutingPass | None,
                    found: StepRouting, timers: Timers) -> None:
    """Give the samples the routes that a pass over ``scored`` (all of them, or some) recorded, as far as they are
    wanted, and keep its figures."""
    config = run.config.routing
    if done is not None:
        with timers("routing"):
            if config.metrics:
                found.old = routing_figures(done)
            if config.replay != "r3":
                wanted = list(range(len(scored))) if config.replay == "r2" else _some(run, scored)
                recorded = collect_routes(done, scored, wanted)
                _leave_out(samples, done.task.shape)
                _attach(scored, wanted, recorded)
            found.moved += done.bytes_moved
    found.stored = sum(stored_bytes(sample) for sample in samples)


def sample_old_policy(run: Run, samples: list[Sample], found: StepRouting, timers: Timers) -> None:
    """Where there is no pass of the old policy: a pass over some sequences, for the figures alone."""
    task = old_policy_task(run) if run.config.routing.metrics else None
    some = [samples[i] for i in _some(run, samples)]
    done = None
    if task is not None:
        temperature = run.config.rollout.temperature
        with timers("routing"):
            done = compute_log_probs(run.policy, some, run.batching, temperature=temperature, routing=task).routing
    note_old_policy(run, samples, some, done, found, timers)


def stored_bytes(sample: Sample) -> int:
    """What a sample's routes take in memory; those that only stand for "unknown" take none."""
    routes = sample.routed_experts
    return 0 if routes is None or 0 in routes.strides else routes.nbytes


def _some(run: Run, samples: Sequence[Sample]) -> list[int]:
    return spread(range(len(samples)), run.config.routing.sampled_sequences)


def _attach(samples: Sequence[Sample], places: Sequence[int], routes: Sequence[np.ndarray]) -> None:
    for place, ids in zip(places, routes, strict=True):
        samples[place].routed_experts, samples[place].route_holes = ids, None


def _leave_out(samples: Sequence[Sample], shape: RouteShape) -> None:
    """Routes that are unknown in every row, and take no memory."""
    for sample in samples:
        rows = sample.length - 1
        nothing = np.zeros((), dtype=shape.dtype)
        sample.routed_experts = np.broadcast_to(nothing, (rows, shape.layers, shape.k))
        sample.route_holes = np.broadcast_to(np.True_, (rows,))
