"""Checks of what is done with rollouts before they are trained on. Each raises ConfigError and returns nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.fields import default_of

if TYPE_CHECKING:
    from megatron_gspo.config.rollout_sections import RolloutConfig
    from megatron_gspo.config.schema import Config


def check_correction(config: Config) -> None:
    """Importance weights and masks between the two engines need both engines' log-probs, and keys that have an
    effect."""
    algorithm = config.algorithm
    for key in ("rollout_is", "rollout_rs"):
        if (value := getattr(algorithm, key)) == "none":
            continue
        if algorithm.is_supervised:
            raise ConfigError(f"algorithm.{key}", value, "sft has no rollouts", "remove the key")
        if algorithm.old_log_probs == "rollout":
            problem = "compares the rollout's log-probs with themselves where algorithm.old_log_probs = rollout"
            fix = "set algorithm.old_log_probs: recompute, or this to none"
            raise ConfigError(f"algorithm.{key}", value, problem, fix)
    default = default_of(type(algorithm), "rollout_is_threshold")
    if algorithm.rollout_is == "none" and algorithm.rollout_is_threshold != default:
        problem, fix = "has no effect with algorithm.rollout_is = none", "set that to token or sequence"
        raise ConfigError("algorithm.rollout_is_threshold", algorithm.rollout_is_threshold, problem, fix)
    _check_band(config)


def _check_band(config: Config) -> None:
    algorithm = config.algorithm
    for key in ("rollout_rs_threshold_lower", "rollout_rs_threshold"):
        if algorithm.rollout_rs == "none" and (value := getattr(algorithm, key)) is not None:
            problem, fix = "has no effect with algorithm.rollout_rs = none", "set that to token or sequence"
            raise ConfigError(f"algorithm.{key}", value, problem, fix)
    if algorithm.rollout_rs == "sequence" and algorithm.rollout_rs_threshold is None:
        problem = "the ratio of a sequence comes closer to 1 the longer it is, so there is no band for all lengths"
        fix = "set it beyond mismatch/ratio_sequence/p99, 1.001 or so for thousands of tokens"
        raise ConfigError("algorithm.rollout_rs_threshold", None, problem, fix)


def check_environment(config: Config) -> None:
    """Keys of multi-turn episodes have an effect, and the rest of the config can do with episodes."""
    algorithm, rollout, data = config.algorithm, config.rollout, config.data
    name = rollout.environment
    if name is None:
        _check_without_environment(config)
        return
    place, _, function = name.rpartition(":")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not (named and function.isidentifier()):
        fix = "set path/to/file.py:factory or package.module:factory"
        raise ConfigError("rollout.environment", name, "is no environment", fix)
    if algorithm.is_supervised:
        raise ConfigError("rollout.environment", name, "sft learns from reference answers", "remove the key")
    if data.verifier is not None:
        problem = "has no effect with rollout.environment, whose rewards are the samples'"
        raise ConfigError("data.verifier", data.verifier, problem, "remove one of the two")
    if rollout.streams:
        key = "max_staleness" if rollout.max_staleness else "oversampling"
        problem = "an episode begins and ends within a step"
        fix = "set it to 0" if key == "max_staleness" else "set it to 1"
        raise ConfigError(f"rollout.{key}", getattr(rollout, key), problem, fix + ", or remove rollout.environment")
    if algorithm.turn_discount is not None and algorithm.importance_sampling_level == "sequence":
        problem = f"{algorithm.name} has one ratio and one advantage a response"
        fix = "set algorithm.name: gspo_token, or this to null"
        raise ConfigError("algorithm.turn_discount", algorithm.turn_discount, problem, fix)


def _check_without_environment(config: Config) -> None:
    keys = ("max_turns", "max_turn_length", "environment_options")
    values = {f"rollout.{key}": (getattr(config.rollout, key), _default(config.rollout, key)) for key in keys}
    values["algorithm.turn_discount"] = (config.algorithm.turn_discount, None)
    for key, (value, default) in values.items():
        if value != default:
            raise ConfigError(key, value, "has no effect without rollout.environment", "set that, or remove this")


def _default(rollout: RolloutConfig, key: str) -> object:
    return default_of(type(rollout), key)


def check_environment_file(rollout: RolloutConfig) -> None:
    """The file of the environment's factory exists."""
    file = (rollout.environment or "").rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        fix = "give its path, then :factory"
        raise ConfigError("rollout.environment", rollout.environment, f"no such file: {file}", fix)
