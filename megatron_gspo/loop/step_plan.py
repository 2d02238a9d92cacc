"""What a step does with a rollout batch, planned once: replicas, mini-batches and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import (
    MicroBatchPlan,
    PackingRules,
    joined,
    plan_micro_batches,
    plan_passes,
)
from megatron_gspo.data.sample_batch import BatchTable


def mini_batches(count: int, size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of the samples of each mini-batch, ascending: drawn by (seed, step, epoch) alone."""
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [sorted(order[start : start + size].tolist()) for start in range(0, count, size)]


@dataclass(frozen=True)
class PlannedUpdate:
    """A mini-batch of one optimizer step."""

    positions: list[int]
    """Of its samples in the rollout batch."""

    packing: MicroBatchPlan
    """Its micro-batches."""

    first_micro_batch: int
    """Number of its first micro-batch among those of its epoch."""


@dataclass(frozen=True)
class StepPlan:
    """Which replica has which sample, and how passes are packed; the same on every rank."""

    rules: PackingRules
    """How the layout packs."""

    replica: np.ndarray
    """[N], the replica of each sample."""

    updates: list[PlannedUpdate]
    """In the order of the optimizer steps."""

    first_epoch: MicroBatchPlan
    """The micro-batches of the first epoch's updates, by positions in the rollout batch. Passes
    without a gradient take these, because the shape of a micro-batch moves log-probs in low
    precision: so a ratio differs from 1 by the weights alone."""

    costs: np.ndarray | None = None
    """[N], the cost of each sample (`SampleFlops.costs`); None: its tokens."""

    @property
    def repacked(self) -> float:
        """Share of the later epochs' micro-batches that are none of the first epoch's."""
        first = set(_shapes(self.first_epoch))
        every = [
            micro_batch
            for update in self.updates
            for micro_batch in _shapes(update.packing.within(update.positions))
        ]
        later = len(every) - len(first)
        return sum(micro_batch not in first for micro_batch in every) / later if later else 0.0

    def of_samples(self, batch: BatchTable, positions: list[int]) -> MicroBatchPlan:
        """Micro-batches of some samples of the rollout batch, on their replicas."""
        lengths = batch.packing_lengths(self.rules.sequence_multiple)[positions]
        costs = None if self.costs is None else self.costs[positions]
        return plan_micro_batches(lengths, self.rules, self.replica[positions], costs=costs)


def plan_step(
    batch: BatchTable,
    homes: np.ndarray | None,
    config: Config,
    rules: PackingRules,
    step: int,
    *,
    costs: np.ndarray | None = None,
) -> StepPlan:
    """The plan of a rollout batch.

    Args:
        homes: [N] the replicas that have the samples; None: all have all.
        costs: [N] of the samples (`SampleFlops.costs`); None: their tokens.
    """
    training = config.training
    lengths = batch.packing_lengths(rules.sequence_multiple)
    epochs = [
        mini_batches(
            len(lengths), training.global_batch_size, seed=config.seed, step=step, epoch=epoch
        )
        for epoch in range(training.ppo_epochs)
    ]
    replica, plans = plan_passes(lengths, epochs, rules, homes, costs=costs)
    first_epoch = joined(
        [plan.within(positions) for positions, plan in zip(epochs[0], plans[0], strict=True)]
    )
    updates = []
    for batches, packings in zip(epochs, plans, strict=True):
        first_micro_batch = 0
        for positions, packing in zip(batches, packings, strict=True):
            updates.append(PlannedUpdate(positions, packing, first_micro_batch))
            first_micro_batch += packing.num_micro_batches
    return StepPlan(rules, replica, updates, first_epoch, costs)


def _shapes(plan: MicroBatchPlan) -> list[tuple[tuple[int, ...], int]]:
    """The sequences of each micro-batch that has any, and what its length is a multiple of."""
    return [
        (tuple(positions), multiple)
        for of_replica in plan.micro_batches
        for positions, multiple in zip(of_replica, plan.total_multiples, strict=True)
        if positions
    ]
