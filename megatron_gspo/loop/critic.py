"""The value model of a run (PPO): the values of a rollout batch, and its optimizer steps."""

from __future__ import annotations

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.optimizer_steps import averaged_metrics, gradient_failure_explained
from megatron_gspo.loop.reward_scoring import counts_in_group
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.value_steps import compute_values, train_critic_mini_batch


def with_values(
    batch: TrainingBatch, critic: Policy, config: Config, plan: StepPlan, timers: Timers
) -> TrainingBatch:
    """The batch with a column ``values`` of the value model before the step's updates."""
    with timers("values"):
        values = compute_values(critic, batch, config.training, plan=plan.first_epoch)
    return batch.with_column("values", values)


def run_critic_steps(
    critic: Policy, batch: TrainingBatch, config: Config, step: int, plan: StepPlan, timers: Timers
) -> dict[str, float]:
    """Train on the mini-batches of a batch with ``values`` and ``returns``;
    ``critic/*`` metrics, means over the optimizer steps."""
    results: list[dict[str, float]] = []
    for update in plan.updates:
        mini_batch = batch.select(update.positions)
        if mini_batch.has_trained_tokens:
            with timers("train_critic"), gradient_failure_explained(step, "critic"):
                results.append(
                    train_critic_mini_batch(
                        critic,
                        mini_batch,
                        config.training,
                        value_clip=config.critic.value_clip,
                        plan=update.packing,
                    )
                )
    return averaged_metrics(results) | explained_variance(batch)


def explained_variance(batch: TrainingBatch) -> dict[str, float]:
    """How well the values predict the returns: 1 - Var(returns - values) / Var(returns) over
    trained tokens of samples whose reward counts, 1 for a perfect value model and 0 for a constant;
    and the mean return. A collective of the batch's group. {} without such tokens, no variance
    where the returns are equal."""
    counted = counts_in_group(batch.table)
    responses = batch.responses
    is_counted = responses["loss_mask"] & responses.repeat(counted[responses.positions])
    returns = responses["returns"][is_counted].astype(np.float64)
    error = returns - responses["values"][is_counted]
    count, returns_sum, returns_squares, error_sum, error_squares = batch.sum(
        len(returns), returns.sum(), (returns**2).sum(), error.sum(), (error**2).sum()
    )
    if not count:
        return {}
    variance = returns_squares / count - (returns_sum / count) ** 2
    metrics = {"critic/return": returns_sum / count}
    if variance > 1e-12 * max(1.0, returns_squares / count):
        unexplained = error_squares / count - (error_sum / count) ** 2
        metrics["critic/explained_variance"] = 1 - unexplained / variance
    return metrics
