"""Routing replay in one step of the loop: options of each pass, checks, and what was recorded and
measured.

| ``routing.replay`` | old log-probs                                 | updates                             |
| ------------------ | --------------------------------------------- | ----------------------------------- |
| none               | live; recorded for some sequences (metrics)   | live; compared with those (metrics) |
| r2                 | live; recorded                                | the recorded routes                 |
| r3                 | the rollout's routes, or live                 | the rollout's routes                |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatron_gspo.config import Config, RoutingConfig
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.route_agreement import check_route_agreement
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.routing_replay.gather_results import (
    flips_of_replica,
    routes_of_replica,
    routing_counts,
    routing_stats,
)
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.pass_counts import PassCounts
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.selections import (
    Query,
    SampledSelections,
    changed_counts,
    changed_shares,
    rollout_counts,
)
from megatron_gspo.parallel.rank_zero import first_failure
from megatron_gspo.routing_replay.perturbation import Perturbation, PerturbedPass
from megatron_gspo.routing_replay.routes import RouteError, RouteShape, check_routes
from megatron_gspo.routing_replay.step_metrics import StepRouting
from megatron_gspo.tracking.run_directory import evenly_spaced


def same_routers(config: Config) -> bool:
    """Whether the rollout engine's routers have the weights of the old policy and no perturbation,
    whose routes should agree but for rounding."""
    return config.routing.perturbation is None and config.rollout.max_staleness == 0


@dataclass
class RoutingReplay:
    """Routing replay in one step."""

    config: RoutingConfig
    """The section ``routing``."""

    shape: RouteShape | None
    """Shape of the routes on this rank, None for a model without experts."""

    has_ratio: bool
    """Whether the objective uses an importance ratio."""

    perturbation: Perturbation | None = None
    """Perturbation of the routers' choice; None without."""

    seed: int = 0
    """Seed of the run, for the perturbation."""

    step: int = 0
    """Step of the run, for the perturbation."""

    same_routers: bool = True
    """What the function ``same_routers`` says of the run."""

    selected_positions: int = 0
    """Positions that a query selects in sparse attention; 0 without."""

    rollout_selections: Mapping[Query, np.ndarray] = field(default_factory=dict)
    """Of sparse attention, what the rollout engine in this rank selected."""

    measured: StepRouting = field(default_factory=StepRouting)
    """What the step measured so far; statistics of its passes from `measure_passes` on."""

    _of_old_policy: list[PassCounts] = field(default_factory=list)
    _of_updates: list[PassCounts] = field(default_factory=list)
    _changed_selections: list[Tensor] = field(default_factory=list)
    _of_rollout: list[Tensor] = field(default_factory=list)

    old_selections: list[SampledSelections] = field(default_factory=list)
    """Of the old policy's pass."""

    def check_rollout_routes(self, batch: SampleBatch) -> None:
        """Check the routes that the rollout engine gave, of all layers: ``RouteError`` naming the
        sample if they can't be used.

        Missing routes are allowed where routes are only compared. A collective of the batch's
        group.
        """
        if not self.config.needs_rollout_routes or self.shape is None:
            return
        missing = self.config.missing_routes if self.config.replay == "r3" else "live"
        count = 0
        failure = ""
        try:
            count = check_routes(batch.samples, self.shape, missing=missing)
        except RouteError as error:
            failure = str(error)
        if (failed := first_failure(failure, batch.group)) is not None:
            raise RouteError(failed[1])
        self.measured.missing_routes = int(batch.sum(count)[0])

    def old_policy_options(self) -> ReplayOptions | None:
        """What the routers do while the old policy's log-probs are computed."""
        config = self.config
        if self.shape is None or not self._is_used:
            return self._perturbed_alone("old policy")
        return ReplayOptions(
            self.shape,
            replay=config.replay == "r3" and config.replay_old_log_probs,
            record=config.replay == "r2" or config.metrics,
            balanced_padding=config.replay == "r2",
            compare=self._compares_rollout,
            neighbours=self._compares_rollout,
            entropy=config.metrics,
            storage=config.storage,
            perturbed_pass=self._perturbed_pass("old policy"),
            selected_positions=self.selected_positions * config.metrics,
        )

    def reference_options(self) -> ReplayOptions | None:
        """What the reference policy's routers do."""
        return self._perturbed_alone("reference policy")

    def update_options(self, number: int) -> ReplayOptions | None:
        """What the routers do in the step's update ``number``."""
        config = self.config
        phase = f"update {number}"
        if self.shape is None or not self._is_used:
            return self._perturbed_alone(phase)
        return ReplayOptions(
            self.shape,
            replay=config.replay != "none",
            compare=config.metrics,
            storage=config.storage,
            perturbed_pass=self._perturbed_pass(phase),
            selected_positions=self.selected_positions * config.metrics,
        )

    def _perturbed_pass(self, phase: str) -> PerturbedPass | None:
        if self.perturbation is None:
            return None
        return PerturbedPass(self.perturbation, "trainer", self.seed, self.step, phase)

    def _perturbed_alone(self, phase: str) -> ReplayOptions | None:
        perturbed = self._perturbed_pass(phase)
        if self.shape is None or perturbed is None:
            return None
        return ReplayOptions(self.shape, storage=self.config.storage, perturbed_pass=perturbed)

    @property
    def _compares_rollout(self) -> bool:
        return self.config.metrics and self.config.needs_rollout_routes

    @property
    def _is_used(self) -> bool:
        return self.has_ratio and self.config.uses_routes

    def metric_sequences(self, count: int) -> list[int]:
        """Positions of the sequences whose routes are recorded for metrics alone, among
        ``count``.
        """
        return evenly_spaced(range(count), self.config.metric_sequences)

    def with_old_routes(
        self,
        batch: TrainingBatch,
        positions: Sequence[int],
        done: Sequence[MicroBatchRoutes] | None,
        timers: Timers,
    ) -> TrainingBatch:
        """The batch with the routes that a pass over those at ``positions`` recorded, where the
        updates need them.

        Keeps the counts of the pass. done: its routes; None if there was no pass. Raises
        ``RouteError`` where the rollout engine's routes are not those of these tokens.
        """
        if done is not None and self._is_used:
            with timers("routing"):
                if self.config.metrics:
                    self._of_old_policy.append(routing_counts(done))
                    self.old_selections = selections_of(done)
                    if self.selected_positions:
                        of_engine = self.rollout_selections if self.same_routers else {}
                        self._of_rollout = [rollout_counts(self.old_selections, of_engine)]
                if self._compares_rollout:
                    check_route_agreement(
                        done, batch.select(positions), same_routers=self.same_routers
                    )
                if self.config.replay != "r3":
                    batch = self._with_recorded(batch, positions, done)
                self.measured.bytes_moved += sum(routes.bytes_moved for routes in done)
        if self.shape is not None:
            [self.measured.bytes_stored] = map(int, batch.sum(stored_bytes(batch, self.shape)))
        return batch

    def _with_recorded(
        self, batch: TrainingBatch, positions: Sequence[int], done: Sequence[MicroBatchRoutes]
    ) -> TrainingBatch:
        """The batch with recorded routes: of all samples at ``positions``, or some for metrics."""
        scored = batch if len(positions) == len(batch) else batch.select(positions)
        wanted = (
            range(len(scored)) if self.config.replay == "r2" else self.metric_sequences(len(scored))
        )
        chosen = scored.inputs.chosen(wanted)
        routes, exchanged = routes_of_replica(done, chosen)
        self.measured.bytes_moved += exchanged
        recorded_positions = np.asarray(positions)[chosen.positions]
        return batch.with_routes(
            Columns.of(recorded_positions, chosen.lengths, routed_experts=routes)
        )

    def add_update(
        self,
        done: Sequence[MicroBatchRoutes] | None,
        batch: TrainingBatch,
        timers: Timers,
        *,
        flips: bool,
    ) -> None:
        """Add what the routers did in an update with ``batch``; ``flips``: for each token too.
        A collective.
        """
        if done is not None and self._is_used:
            with timers("routing"):
                self._of_updates.append(routing_counts(done))
                if done[0].options.selected_positions:
                    self._changed_selections.append(
                        changed_counts(self.old_selections, selections_of(done), done[0].groups.tp)
                    )
                self.measured.flips = (
                    flips_of_replica(done, batch) if flips and done[0].options.compare else None
                )
                self.measured.bytes_moved += sum(routes.bytes_moved for routes in done)

    def measure_passes(self, timers: Timers) -> None:
        """Make the statistics of the step's passes. A collective of the world."""
        passes = [*self._of_old_policy, *self._of_updates]
        if not passes:
            return
        with timers("routing"):
            stats = routing_stats(passes)
            if counts := [*self._of_rollout, *self._changed_selections]:
                shares = changed_shares(counts)
                self.measured.selections_unlike_rollout = shares[: len(self._of_rollout)]
                self.measured.selections_changed = shares[len(self._of_rollout) :]
        if self._of_old_policy:
            self.measured.old = stats.pop(0)
        self.measured.updates = stats


def selections_of(done: Sequence[MicroBatchRoutes]) -> list[SampledSelections]:
    """What a pass sampled."""
    return [routes.selections for routes in done if routes.selections is not None]


def stored_bytes(batch: TrainingBatch, shape: RouteShape) -> int:
    """Memory of the routes of this replica's samples on all pipeline stages together; a sample
    whose routes are all missing takes none.
    """
    if "routed_experts" not in batch.inputs:
        return 0
    is_known = batch.inputs.sums(~batch.inputs["missing_routes"]) > 1  # the last row is none
    return int((batch.inputs.lengths - 1)[is_known].sum()) * shape.bytes_per_token
