"""Checks of sampling, of asynchronous generation and of multi-turn environments.

Each raises ConfigError.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_sections import DataConfig
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_sections import ServerConfig
from megatron_gspo.config.training_sections import EvaluationConfig
from megatron_gspo.user_code import is_import_path


def check_sampling(rollout: RolloutConfig, evaluation: EvaluationConfig) -> None:
    """Training samples are drawn from the distribution that their log-probs describe."""
    for key in ("top_p", "top_k", "min_p"):
        off = default_of(RolloutConfig, key)
        if (value := getattr(rollout, key)) == off or rollout.max_support:
            continue
        problem = "training log-probs are over the whole vocabulary"
        fix = f"set {off:g}, or rollout.max_support"
        raise ConfigError(f"rollout.{key}", value, problem, fix)
    for key in ("top_p", "top_k"):
        off = default_of(RolloutConfig, key)
        if evaluation.temperature == 0 and (value := getattr(evaluation, key)) != off:
            problem = "has no effect with evaluation.temperature = 0"
            raise ConfigError(
                f"evaluation.{key}", value, problem, "remove it, or set a temperature above 0"
            )
    if rollout.temperature == 0:
        problem = "greedy responses to one prompt are all equal"
        raise ConfigError(
            "rollout.temperature", rollout.temperature, problem, "set it above 0, 1 is usual"
        )


def check_support(
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    *,
    has_teacher: bool,
    samples_are_runs: bool,
) -> None:
    """The engine returns the ids that could be drawn, and what reads log-probs reads them over
    these.

    samples_are_runs: of agents, or episodes.
    """
    if not rollout.max_support:
        return
    fix = "set it to 0, and rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0"
    if not rollout.truncates:
        problem = "has no effect without rollout.top_p, rollout.top_k or rollout.min_p"
        fix = "set one of them, or remove it"
    elif rollout.engine == "sft":
        problem = "reference answers are not drawn"
    elif rollout.engine == "sglang" and not rollout.top_k:
        problem = "SGLang returns the ids that could be drawn only with rollout.top_k"
        fix = "set rollout.top_k to it, or below"
    elif samples_are_runs:
        problem = "runs and episodes do not have the ids that could be drawn"
    elif has_teacher or algorithm.score_centering:
        key = "distillation.teacher" if has_teacher else "algorithm.score_centering"
        problem = f"{key} compares policies over the whole vocabulary"
    else:
        return
    raise ConfigError("rollout.max_support", rollout.max_support, problem, fix)


def check_staleness(rollout: RolloutConfig, servers: ServerConfig) -> None:
    """overlap, max_staleness and oversampling of a server engine are compatible."""
    if rollout.overlap and not rollout.max_staleness:
        problem = "samples generated while training are one update behind"
        raise ConfigError(
            "rollout.overlap", True, problem, "set rollout.max_staleness to 1 or more"
        )
    if rollout.overlap and servers.colocated:
        problem = (
            "the servers release their memory while the trainer works"
            f" ({servers.section}.colocated)"
        )
        raise ConfigError("rollout.overlap", True, problem, "set one of the two to false")
    if rollout.max_staleness and rollout.oversampling > 1 + rollout.max_staleness:
        behind = rollout.oversampling - 1
        limit = rollout.max_staleness
        problem = (
            f"the last groups would be {behind:g} updates behind, and rollout.max_staleness ="
            f" {limit}"
        )
        fix = f"set it to {1 + limit} at most, or raise rollout.max_staleness"
        raise ConfigError("rollout.oversampling", rollout.oversampling, problem, fix)
    if rollout.max_staleness and not rollout.overlap and rollout.oversampling == 1:
        problem = "without rollout.overlap and rollout.oversampling no sample is ever behind"
        fix = "set rollout.overlap: true or rollout.oversampling above 1, or this to 0"
        raise ConfigError("rollout.max_staleness", rollout.max_staleness, problem, fix)


def check_offloading(rollout: RolloutConfig, servers: ServerConfig) -> None:
    """The engine generates on the trainer's GPUs, and not while it trains.

    servers: of the engine.
    """
    if not rollout.offload_trainer:
        return
    if rollout.engine == "sft":
        problem = "trains on reference answers (rollout.engine: sft)"
        fix = "remove it"
    elif rollout.overlap:
        problem = "the trainer works meanwhile (rollout.overlap)"
        fix = "set one of the two to false"
    elif servers.is_set and not servers.colocated:
        fix = f"set {servers.section}.colocated: true, or remove it"
        problem = "the servers have GPUs of their own"
    else:
        return
    raise ConfigError("rollout.offload_trainer", True, problem, fix)


def check_environment(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, data: DataConfig, *, has_turns: bool
) -> None:
    """The environment's name is valid, the other sections support episodes, and its keys have
    an effect.

    has_turns: whether samples have turns without an environment, by agents.
    """
    name = rollout.environment
    if name is None:
        _check_without_environment(rollout)
    if name is None and not has_turns:
        if algorithm.turn_discount is not None:
            raise _without_environment("algorithm.turn_discount", algorithm.turn_discount)
        return
    _check_turns(algorithm)
    if name is None:
        return
    if not is_import_path(name):
        fix = "set path/to/file.py:factory or package.module:factory"
        raise ConfigError("rollout.environment", name, "is not an environment", fix)
    if algorithm.is_supervised:
        raise ConfigError(
            "rollout.environment", name, "sft trains on reference answers", "remove the key"
        )
    for key, verifier in data.given_verifiers.items():
        problem = "has no effect with rollout.environment, which scores the episodes"
        raise ConfigError(key, verifier, problem, "remove one of the two")


def _check_turns(algorithm: AlgorithmConfig) -> None:
    """The objective takes an advantage per turn, if it is to."""
    if algorithm.turn_discount is None:
        return
    if algorithm.has_own_advantages:
        raise ConfigError(
            "algorithm.turn_discount",
            algorithm.turn_discount,
            "your own algorithm.advantage_estimator gives one advantage per response",
            "remove it, or set algorithm.advantage_estimator: group",
        )
    if algorithm.importance_sampling_level in ("sequence", "geometric_mean"):
        problem = f"{algorithm.name} has one ratio and one advantage per response"
        fix = "set algorithm.name: gspo_token, or this to null"
        raise ConfigError("algorithm.turn_discount", algorithm.turn_discount, problem, fix)


def _check_without_environment(rollout: RolloutConfig) -> None:
    for key in ("max_turns", "max_turn_length", "environment_options"):
        if (value := getattr(rollout, key)) != default_of(RolloutConfig, key):
            raise _without_environment(f"rollout.{key}", value)


def _without_environment(key: str, value: object) -> ConfigError:
    return ConfigError(
        key, value, "has no effect without rollout.environment", "set that, or remove this"
    )


def check_environment_file(rollout: RolloutConfig) -> None:
    """The file of the environment's factory exists."""
    if rollout.environment is not None:
        check_import_file("rollout.environment", rollout.environment, "factory")


def check_import_file(key: str, name: str, noun: str) -> None:
    """The file of an import path exists, if it names one. noun: what is in it."""
    file = name.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(key, name, f"no such file: {file}", f"give its path, then :{noun}")
