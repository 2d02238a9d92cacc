"""What a step does with a rollout batch, planned once: replicas, mini-batches and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan, PackingRules, assign_replicas, plan_micro_batches


def mini_batches(count: int, size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of the samples of each mini-batch: a permutation that depends on (seed, step, epoch) alone."""
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [order[start : start + size].tolist() for start in range(0, count, size)]


@dataclass(frozen=True)
class StepPlan:
    """Which replica has which sample, and how passes are packed; the same on every rank.

    rules: of the layout. replica: [N]. whole: micro-batches of the whole rollout batch, for passes without a gradient.
    updates: (positions, micro-batches) of each mini-batch, in the order of the optimizer steps.
    """

    rules: PackingRules
    replica: np.ndarray
    whole: MicroBatchPlan
    updates: list[tuple[list[int], MicroBatchPlan]]

    def part(self, lengths: np.ndarray, positions: list[int]) -> MicroBatchPlan:
        """Micro-batches of some samples of the rollout batch, on their replicas."""
        return plan_micro_batches(lengths[positions], self.rules, self.replica[positions])


def plan_step(lengths: np.ndarray, config: Config, rules: PackingRules, step: int) -> StepPlan:
    """The plan of a rollout batch whose samples have `lengths` [N] tokens."""
    training = config.training
    epochs = [
        mini_batches(len(lengths), training.global_batch_size, seed=config.seed, step=step, epoch=epoch)
        for epoch in range(training.ppo_epochs)
    ]
    replica = assign_replicas(lengths, epochs, rules)
    # one pass: the replicas are those of the mini-batches' own schedules, which pack best
    fixed = replica if len(epochs) > 1 else None
    updates = [
        (rows, plan_micro_batches(lengths[rows], rules, None if fixed is None else fixed[rows]))
        for batches in epochs
        for rows in batches
    ]
    return StepPlan(rules, replica, plan_micro_batches(lengths, rules, replica), updates)
