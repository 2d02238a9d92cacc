"""Checks of what is done with rollouts before they are trained on. Each raises ConfigError and returns nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gspo.config.base import ConfigError

if TYPE_CHECKING:
    from megatron_gspo.config.schema import Config


def check_correction(config: Config) -> None:
    """Importance weights and masks between the two engines need both engines' log-probs, and keys that have an
    effect."""
    algorithm = config.algorithm
    for key in ("rollout_correction", "rollout_mask"):
        if (value := getattr(algorithm, key)) == "none":
            continue
        if algorithm.is_supervised:
            raise ConfigError(f"algorithm.{key}", value, "sft has no rollouts", "remove the key")
        if algorithm.old_log_probs == "rollout":
            problem = "compares the rollout's log-probs with themselves where algorithm.old_log_probs = rollout"
            fix = "set algorithm.old_log_probs: recompute, or this to none"
            raise ConfigError(f"algorithm.{key}", value, problem, fix)
    default = type(algorithm).model_fields["rollout_correction_cap"].default
    if algorithm.rollout_correction == "none" and algorithm.rollout_correction_cap != default:
        problem, fix = "has no effect with algorithm.rollout_correction = none", "set that to token or sequence"
        raise ConfigError("algorithm.rollout_correction_cap", algorithm.rollout_correction_cap, problem, fix)
    _check_band(config)


def _check_band(config: Config) -> None:
    algorithm = config.algorithm
    for key in ("rollout_mask_low", "rollout_mask_high"):
        if algorithm.rollout_mask == "none" and (value := getattr(algorithm, key)) is not None:
            problem, fix = "has no effect with algorithm.rollout_mask = none", "set that to token or sequence"
            raise ConfigError(f"algorithm.{key}", value, problem, fix)
    if algorithm.rollout_mask == "sequence" and algorithm.rollout_mask_high is None:
        problem = "the ratio of a sequence comes closer to 1 the longer it is, so there is no band for all lengths"
        fix = "set it beyond mismatch/ratio_sequence/p99, 1.001 or so for thousands of tokens"
        raise ConfigError("algorithm.rollout_mask_high", None, problem, fix)
