"""Routing replay in one step of the loop: options of each pass, checks, and what was recorded and measured.

| ``routing.replay`` | old log-probs                                 | updates                             |
| ------------------ | --------------------------------------------- | ----------------------------------- |
| none               | live; recorded for some sequences (metrics)   | live; compared with those (metrics) |
| r2                 | live; recorded                                | the recorded routes                 |
| r3                 | the rollout's routes, or live                 | the rollout's routes                |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_gspo.config import Config, RoutingConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.routing_replay.gather_results import gather_flips, gather_routes, routing_stats
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, ReplayOptions
from megatron_gspo.routing_replay.router_noise import RouterNoise, pass_seed
from megatron_gspo.routing_replay.routes import RouteShape, check_routes
from megatron_gspo.routing_replay.step_metrics import StepRouting
from megatron_gspo.tracking.run_directory import evenly_spaced


def trainer_noise(config: Config, step: int) -> RouterNoise | None:
    """The noise of the trainer's routers in a step; None without."""
    noise = config.router_noise
    if not noise.in_trainer:
        return None
    assert noise.strength is not None
    seed = pass_seed(noise.seed, config.seed, step)
    return RouterNoise(noise.strength, seed, perturb_weights=noise.perturb_weights)


@dataclass
class RoutingReplay:
    """Routing replay in one step.

    config: section ``routing``. shape: of a token's routes, None for a model without experts. has_ratio: whether the
    objective uses an importance ratio. noise: of the trainer's routers in this step, with other random numbers in each
    pass; None without. measured: what the step measured so far.
    """

    config: RoutingConfig
    shape: RouteShape | None
    has_ratio: bool
    noise: RouterNoise | None = None
    measured: StepRouting = field(default_factory=StepRouting)

    def check_rollout_routes(self, samples: Sequence[Sample]) -> None:
        """Check the routes that the rollout engine gave; ``RouteError`` naming the sample if they can't be used.

        Missing routes are allowed where routes are only compared.
        """
        if self.config.needs_rollout_routes and self.shape is not None:
            missing = self.config.missing_routes if self.config.replay == "r3" else "live"
            self.measured.missing_routes = check_routes(samples, self.shape, missing=missing)

    def old_policy_options(self) -> ReplayOptions | None:
        """What the routers do while the old policy's log-probs are computed."""
        config = self.config
        if self.shape is None or not self._is_used:
            return self._noise_alone("old policy")
        return ReplayOptions(
            self.shape,
            replay=config.replay == "r3" and config.replay_old_log_probs,
            record=config.replay == "r2" or config.metrics,
            compare=config.metrics and config.needs_rollout_routes,
            entropy=config.metrics,
            storage=config.storage,
            noise=self._noise_of("old policy"),
        )

    def reference_options(self) -> ReplayOptions | None:
        """What the reference policy's routers do."""
        return self._noise_alone("reference policy")

    def update_options(self, number: int) -> ReplayOptions | None:
        """What the routers do in the step's update ``number``."""
        config, name = self.config, f"update {number}"
        if self.shape is None or not self._is_used:
            return self._noise_alone(name)
        return ReplayOptions(
            self.shape, replay=config.replay != "none", compare=config.metrics, storage=config.storage,
            noise=self._noise_of(name),
        )  # fmt: skip

    def _noise_of(self, name: str) -> RouterNoise | None:
        return None if self.noise is None else replace(self.noise, seed=pass_seed(self.noise.seed, name))

    def _noise_alone(self, name: str) -> ReplayOptions | None:
        if self.shape is None or self.noise is None:
            return None
        return ReplayOptions(self.shape, storage=self.config.storage, noise=self._noise_of(name))

    @property
    def _is_used(self) -> bool:
        return self.has_ratio and self.config.uses_routes

    def metric_sequences(self, samples: Sequence[Sample]) -> list[int]:
        """Positions of the sequences whose routes are recorded for metrics alone."""
        return evenly_spaced(range(len(samples)), self.config.metric_sequences)

    def with_old_routes(self, samples: Sequence[Sample], positions: Sequence[int],
                        done: Sequence[MicroBatchRoutes] | None, timers: Timers) -> list[Sample]:
        """The samples with the routes that a pass over those at ``positions`` recorded, where the updates need them.

        Keeps the statistics of the pass. done: its routes; None if there was no pass.
        """
        found = list(samples)
        if done is not None and self._is_used:
            with timers("routing"):
                scored = [samples[i] for i in positions]
                if self.config.metrics:
                    self.measured.old = routing_stats(done)
                if self.config.replay != "r3":
                    wanted = list(range(len(scored))) if self.config.replay == "r2" else self.metric_sequences(scored)
                    recorded, exchanged = gather_routes(done, scored, wanted)
                    found = [without_routes(sample, done[0].options.shape) for sample in samples]
                    for i, routes in zip(wanted, recorded, strict=True):
                        found[positions[i]] = replace(scored[i], routed_experts=routes, missing_routes=None)
                    self.measured.bytes_moved += exchanged
                self.measured.bytes_moved += sum(routes.bytes_moved for routes in done)
        self.measured.bytes_stored = sum(stored_bytes(sample) for sample in found)
        return found

    def add_update(self, done: Sequence[MicroBatchRoutes] | None, batch: Sequence[Sample], timers: Timers, *,
                   flips: bool) -> None:
        """Add what the routers did in an update with ``batch``; ``flips``: for each token too. A collective."""
        if done is not None and self._is_used:
            with timers("routing"):
                self.measured.updates.append(routing_stats(done))
                self.measured.flips = gather_flips(done, batch) if flips and done[0].options.compare else None
                self.measured.bytes_moved += sum(routes.bytes_moved for routes in done)


def stored_bytes(sample: Sample) -> int:
    """Memory of a sample's routes; a placeholder for missing routes takes none."""
    routes = sample.routed_experts
    return 0 if routes is None or 0 in routes.strides else routes.nbytes


def without_routes(sample: Sample, shape: RouteShape) -> Sample:
    """The sample with every route missing, without memory for them."""
    rows = sample.length - 1
    return replace(
        sample,
        routed_experts=np.broadcast_to(np.zeros((), dtype=shape.dtype), (rows, shape.layers, shape.k)),
        missing_routes=np.broadcast_to(np.True_, (rows,)),
    )
