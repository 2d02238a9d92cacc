"""Old and reference log-probs are computed here: of the policy before the step's updates, and of the frozen start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.rollout_correction import mismatch
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import compute_log_probs


def with_log_probs(
    samples: Sequence[Sample], policy: Policy, reference: Policy | None, config: Config, routing: RoutingReplay,
    timers: Timers,
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with ``old_log_probs`` [R] of the training engine (or the rollout's own), ``ref_log_probs`` [R] if
    there is a reference policy, and the routes that the updates need; ``mismatch/*`` and ``entropy``.

    Without an importance ratio and a reference the samples are returned unchanged.
    """  # fmt: skip
    if not routing.has_ratio and reference is None:
        return list(samples), {}
    metrics: dict[str, float] = {}
    if config.algorithm.old_log_probs == "rollout":
        samples = _with_rollout_log_probs(samples, policy, config, routing, timers)
    else:
        samples, metrics = _with_old_log_probs(samples, policy, config, routing, timers)
    if reference is not None:
        with timers("log_probs"):
            scores = compute_log_probs(
                reference, samples, config.training, temperature=config.rollout.temperature,
                routing=routing.reference_options(),
            )  # fmt: skip
        samples = [replace(s, ref_log_probs=value) for s, value in zip(samples, scores.log_probs, strict=True)]
    return samples, metrics


def _with_old_log_probs(
    samples: Sequence[Sample], policy: Policy, config: Config, routing: RoutingReplay, timers: Timers
) -> tuple[list[Sample], dict[str, float]]:
    """Recomputed by the training engine."""
    with timers("log_probs"):
        scores = compute_log_probs(
            policy, samples, config.training, temperature=config.rollout.temperature, with_entropy=True,
            routing=routing.old_policy_options(),
        )  # fmt: skip
    samples = routing.with_old_routes(samples, range(len(samples)), scores.routing, timers)
    assert scores.entropy is not None
    metrics = mismatch(samples, scores.log_probs) | {"entropy": _mean_of_trained(scores.entropy, samples)}
    return [replace(s, old_log_probs=value) for s, value in zip(samples, scores.log_probs, strict=True)], metrics


def _with_rollout_log_probs(
    samples: Sequence[Sample], policy: Policy, config: Config, routing: RoutingReplay, timers: Timers
) -> list[Sample]:
    """The rollout engine's own. A pass over some sequences measures their routes, if metrics need them."""
    if any(sample.rollout_log_probs is None for sample in samples):
        problem = "the engine gives no log-probs"
        raise ConfigError("algorithm.old_log_probs", "rollout", problem, "set it to recompute")
    options = routing.old_policy_options() if config.routing.metrics else None
    positions = routing.metric_sequences(samples)
    done = None
    if options is not None:
        with timers("routing"):
            done = compute_log_probs(
                policy, [samples[i] for i in positions], config.training,
                temperature=config.rollout.temperature, routing=options,
            ).routing  # fmt: skip
    samples = routing.with_old_routes(samples, positions, done, timers)
    return [replace(sample, old_log_probs=sample.rollout_log_probs) for sample in samples]


def _mean_of_trained(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> float:
    trained = np.concatenate([sample.loss_mask for sample in samples])
    return float(np.concatenate(values)[trained].mean()) if trained.any() else float("nan")
