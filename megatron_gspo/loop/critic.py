"""The value model of a run (PPO): the values of a rollout batch, and its optimizer steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.optimizer_steps import averaged_metrics, explained
from megatron_gspo.loop.reward_scoring import counts_in_group
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.value_steps import compute_values, train_critic_mini_batch


def with_values(
    batch: SampleBatch, critic: Policy, config: Config, plan: StepPlan, timers: Timers
) -> SampleBatch:
    """The samples with ``values`` [R] of the value model before the step's updates."""
    with timers("values"):
        values = compute_values(critic, batch, config.training, plan=plan.first_epoch)
    return batch.map(lambda i, sample: replace(sample, values=values[i]))


def run_critic_steps(
    critic: Policy, batch: SampleBatch, config: Config, step: int, plan: StepPlan, timers: Timers
) -> dict[str, float]:
    """Train on the mini-batches of a rollout batch, whose samples have ``values`` and ``returns``;
    ``critic/*`` metrics, means over the optimizer steps."""
    results: list[dict[str, float]] = []
    for rows, packing in plan.updates:
        part = batch.select(rows)
        if part.has_trained_tokens:
            with timers("train_critic"), explained(step, "critic"):
                results.append(
                    train_critic_mini_batch(
                        critic,
                        part,
                        config.training,
                        value_clip=config.critic.value_clip,
                        plan=packing,
                    )
                )
    return averaged_metrics(results) | explained_variance(batch)


def explained_variance(batch: SampleBatch) -> dict[str, float]:
    """How well the values predict the returns: 1 - Var(returns - values) / Var(returns) over
    trained tokens of samples whose reward counts, 1 for a perfect value model and 0 for a constant;
    and the mean return. A collective of the batch's group. {} without such tokens, no variance
    where the returns are equal."""
    counted = counts_in_group(batch.table)
    sums = np.zeros(5)
    for i, sample in batch.held.items():
        if counted[i] and sample.values is not None and sample.returns is not None:
            values = sample.values[sample.loss_mask]
            returns = sample.returns[sample.loss_mask].astype(np.float64)
            error = returns - values
            sums += len(values), returns.sum(), (returns**2).sum(), error.sum(), (error**2).sum()
    count, returns_sum, returns_squares, error_sum, error_squares = batch.sum(*sums)
    if not count:
        return {}
    variance = returns_squares / count - (returns_sum / count) ** 2
    metrics = {"critic/return": returns_sum / count}
    if variance > 1e-12 * max(1.0, returns_squares / count):
        unexplained = error_squares / count - (error_sum / count) ** 2
        metrics["critic/explained_variance"] = 1 - unexplained / variance
    return metrics
