"""What a step does with a rollout batch, planned once: replicas, mini-batches and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import (
    MicroBatchPlan,
    PackingRules,
    plan_micro_batches,
    plan_passes,
)


def mini_batches(count: int, size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of the samples of each mini-batch: a permutation that depends on (seed, step,
    epoch) alone.
    """
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [order[start : start + size].tolist() for start in range(0, count, size)]


@dataclass(frozen=True)
class StepPlan:
    """Which replica has which sample, and how passes are packed; the same on every rank.

    rules: of the layout. replica: [N]. whole: micro-batches of the whole rollout batch, for passes
    without a gradient. updates: (positions, micro-batches) of each mini-batch, in the order of the
    optimizer steps.
    """

    rules: PackingRules
    replica: np.ndarray
    whole: MicroBatchPlan
    updates: list[tuple[list[int], MicroBatchPlan]]

    def part(self, lengths: np.ndarray, positions: list[int]) -> MicroBatchPlan:
        """Micro-batches of some samples of the rollout batch, on their replicas."""
        return plan_micro_batches(lengths[positions], self.rules, self.replica[positions])


def plan_step(
    lengths: np.ndarray, homes: np.ndarray | None, config: Config, rules: PackingRules, step: int
) -> StepPlan:
    """The plan of a rollout batch whose samples have `lengths` [N] tokens and are in the replicas
    `homes` [N]; None: in all."""
    training = config.training
    epochs = [
        mini_batches(
            len(lengths), training.global_batch_size, seed=config.seed, step=step, epoch=epoch
        )
        for epoch in range(training.ppo_epochs)
    ]
    replica, plans = plan_passes(lengths, epochs, rules, homes)
    updates = [
        (rows, plan)
        for batches, packed in zip(epochs, plans, strict=True)
        for rows, plan in zip(batches, packed, strict=True)
    ]
    return StepPlan(rules, replica, plan_micro_batches(lengths, rules, replica), updates)
