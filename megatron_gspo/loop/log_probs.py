"""Old and reference log-probs are computed here: of the policy before the step's updates, and
of the frozen start.
"""

from __future__ import annotations

import numpy as np

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.config import Config, ConfigError, RolloutConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.rollout_correction import mismatch
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import compute_log_probs


def with_log_probs(
    batch: TrainingBatch,
    policy: Policy,
    reference: Policy | None,
    config: Config,
    plan: StepPlan,
    routing: RoutingReplay,
    timers: Timers,
    ratios: dict[str, RatioHistogram],
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with columns ``old_log_probs`` of the training engine (or the rollout's own) and
    ``ref_log_probs`` if there is a reference policy, and with the routes that the updates need;
    ``mismatch/*`` and ``entropy``.

    Without an importance ratio and a reference the batch is returned unchanged. ``ratios``: as of
    ``mismatch``.
    """
    check_supports(batch, config.rollout)
    if not routing.has_ratio and reference is None:
        return batch, {}
    metrics: dict[str, float] = {}
    if config.algorithm.old_log_probs == "rollout":
        batch = _with_rollout_log_probs(batch, policy, config, plan, routing, timers)
    else:
        batch, metrics = _with_old_log_probs(batch, policy, config, plan, routing, timers, ratios)
    if reference is not None:
        with timers("log_probs"):
            ref_log_probs = compute_log_probs(
                reference,
                batch,
                config.training,
                temperature=config.rollout.temperature,
                routing=routing.reference_options(),
                plan=plan.first_epoch,
            ).log_probs
        batch = batch.with_column("ref_log_probs", ref_log_probs)
    return batch, metrics


def check_supports(batch: TrainingBatch, rollout: RolloutConfig) -> None:
    """The samples of a truncated sampler have the ids that could be drawn; else ``ConfigError``."""
    responses = batch.responses
    if rollout.max_support and len(responses) and "support_lengths" not in responses:
        problem = "the engine does not return the ids that could be drawn"
        raise ConfigError(
            "rollout.max_support", rollout.max_support, problem, "use another rollout.engine"
        )


def _with_old_log_probs(
    batch: TrainingBatch,
    policy: Policy,
    config: Config,
    plan: StepPlan,
    routing: RoutingReplay,
    timers: Timers,
    ratios: dict[str, RatioHistogram],
) -> tuple[TrainingBatch, dict[str, float]]:
    """Recomputed by the training engine."""
    with timers("log_probs"):
        scores = compute_log_probs(
            policy,
            batch,
            config.training,
            temperature=config.rollout.temperature,
            with_entropy=True,
            routing=routing.old_policy_options(),
            plan=plan.first_epoch,
        )
    batch = routing.with_old_routes(batch, range(len(batch)), scores.routing, timers)
    assert scores.entropy is not None
    metrics = mismatch(batch, scores.log_probs, ratios) | {
        "entropy": _mean_of_trained(scores.entropy, batch)
    }
    return batch.with_column("old_log_probs", scores.log_probs), metrics


def _with_rollout_log_probs(
    batch: TrainingBatch,
    policy: Policy,
    config: Config,
    plan: StepPlan,
    routing: RoutingReplay,
    timers: Timers,
) -> TrainingBatch:
    """The rollout engine's own.

    A pass over some sequences measures their routes, if metrics need them.
    """
    if batch.lacks("rollout_log_probs"):
        problem = "the engine gives no log-probs"
        raise ConfigError("algorithm.old_log_probs", "rollout", problem, "set it to recompute")
    options = routing.old_policy_options() if config.routing.metrics else None
    positions = routing.metric_sequences(len(batch))
    done = None
    if options is not None:
        with timers("routing"):
            done = compute_log_probs(
                policy,
                batch.select(positions),
                config.training,
                temperature=config.rollout.temperature,
                routing=options,
                plan=plan.of_samples(batch, positions),
            ).routing
    batch = routing.with_old_routes(batch, positions, done, timers)
    return batch.with_column("old_log_probs", batch.responses["rollout_log_probs"])


def _mean_of_trained(values: np.ndarray, batch: TrainingBatch) -> float:
    trained_values = values[batch.responses["loss_mask"]]
    total, count = batch.sum(float(trained_values.sum(dtype=np.float64)), len(trained_values))
    return total / count if count else float("nan")
