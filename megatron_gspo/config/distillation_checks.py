"""Checks of section `distillation`. Each raises ConfigError."""

from __future__ import annotations

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.distillation_section import DistillationConfig
from megatron_gspo.config.fields import default_of, field_types
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_checks import check_urls
from megatron_gspo.models.config_defaults import HFConfig


def check_distillation(
    distillation: DistillationConfig, algorithm: AlgorithmConfig, rollout: RolloutConfig
) -> None:
    """The objective takes an advantage per token, and the section's keys have an effect."""
    if not distillation.is_on:
        for key in field_types(DistillationConfig):
            value = getattr(distillation, key)
            if value != default_of(DistillationConfig, key):
                problem = "has no effect without distillation.teacher"
                raise ConfigError(f"distillation.{key}", value, problem, "set that, or remove this")
        return
    _check_urls(distillation, rollout)
    teacher = distillation.teacher
    if not algorithm.has_ratio:
        problem = f"is compared with the policy that sampled, and {algorithm.name} has none"
        fix = "set algorithm.name: gspo_token, or remove the key"
        raise ConfigError("distillation.teacher", teacher, problem, fix)
    if algorithm.importance_sampling_level in ("sequence", "geometric_mean"):
        problem = (
            f"gives an advantage per token; {algorithm.name} has one ratio and one advantage per"
            " response"
        )
        raise ConfigError(
            "distillation.teacher", teacher, problem, "set algorithm.name: gspo_token"
        )


def _check_urls(distillation: DistillationConfig, rollout: RolloutConfig) -> None:
    check_urls("distillation.urls", distillation.urls)
    if not distillation.urls:
        for key in ("engine", "api_key_file"):
            value = getattr(distillation, key)
            if value != default_of(DistillationConfig, key):
                problem = "has no effect without distillation.urls"
                raise ConfigError(f"distillation.{key}", value, problem, "set that, or remove this")
        return
    if distillation.top_k:
        problem = "needs the teacher's most likely ids, which are not requested of servers"
        fix = "set it to 0, or remove distillation.urls"
        raise ConfigError("distillation.top_k", distillation.top_k, problem, fix)
    if rollout.temperature != 1.0:
        problem = "servers score given tokens at temperature 1, with distillation.urls"
        fix = "set it to 1, or remove distillation.urls"
        raise ConfigError("rollout.temperature", rollout.temperature, problem, fix)


def check_teacher_model(
    distillation: DistillationConfig, teacher: HFConfig, policy: HFConfig
) -> None:
    """The teacher scores every token of the policy.

    Args:
        teacher, policy: their config.json.
    """
    path = distillation.teacher
    for name, words in (("vocab_size", "a vocabulary"), ("max_position_embeddings", "positions")):
        if (value := teacher.get(name)) is not None and value < policy.get(name, 0):
            problem = f"has {words} of {value}, the policy of {policy[name]}"
            fix = "use a teacher with the policy's tokenizer and length"
            raise ConfigError("distillation.teacher", path, problem, fix)
    if distillation.top_k > policy["vocab_size"]:
        problem = f"the policy has {policy['vocab_size']} ids"
        raise ConfigError(
            "distillation.top_k", distillation.top_k, problem, "lower it, 32 is usual"
        )
