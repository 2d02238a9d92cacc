"""Checks of section `distillation`. Each raises ConfigError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_checks import METRIC_NAME
from megatron_gspo.config.data_sections import DataConfig
from megatron_gspo.config.distillation_section import (
    DistillationConfig,
    TeacherConfig,
    TeacherServersConfig,
)
from megatron_gspo.config.fields import default_of, field_types
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_checks import check_urls
from megatron_gspo.config.training_sections import TrainingConfig
from megatron_gspo.models.config_defaults import HFConfig


def check_distillation(
    distillation: DistillationConfig,
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    data: DataConfig,
    training: TrainingConfig,
) -> None:
    """The objective takes an advantage per token, the section's keys have an effect, and a prompt
    can name its teacher."""
    if not distillation.is_on:
        keys = list(field_types(DistillationConfig))
        _refuse_set(distillation, keys, "without distillation.teacher")
        return
    _check_objective(distillation, algorithm)
    if distillation.teachers:
        _check_names(distillation)
        _check_choice(distillation, data)
    else:
        _refuse_set(distillation, ["teacher_field"], "without distillation.teachers")
    if distillation.takes_all_ids:
        _check_all_ids(distillation, training)
    for teacher in distillation.by_name.values():
        _check_urls(teacher, distillation, rollout)


def _check_all_ids(distillation: DistillationConfig, training: TrainingConfig) -> None:
    """The updates read hidden states of one teacher, of micro-batches that it has scored."""
    problem = ""
    if len(distillation.teachers) > 1:
        problem = (
            f"needs the hidden states of one teacher, and there are {len(distillation.teachers)}"
        )
    if training.ppo_epochs > 1:
        problem = (
            "needs the micro-batches that the teacher has scored, and training.ppo_epochs ="
            f" {training.ppo_epochs} packs others"
        )
    if problem:
        raise ConfigError("distillation.top_k", "all", problem, "set a number, 32 is usual")


def _refuse_set(
    section: object, keys: Sequence[str], reason: str, prefix: str = "distillation"
) -> None:
    """The keys have their defaults: ``reason`` says without what they have no effect."""
    for key in keys:
        value = getattr(section, key)
        if value != default_of(type(section), key):
            problem = f"has no effect {reason}"
            raise ConfigError(f"{prefix}.{key}", value, problem, "set that, or remove this")


def _check_objective(distillation: DistillationConfig, algorithm: AlgorithmConfig) -> None:
    key = "distillation.teachers" if distillation.teachers else "distillation.teacher"
    value = list(distillation.by_name) if distillation.teachers else distillation.teacher
    if not algorithm.has_ratio:
        problem = f"is compared with the policy that sampled, and {algorithm.name} has none"
        fix = "set algorithm.name: gspo_token, or remove the key"
        raise ConfigError(key, value, problem, fix)
    if algorithm.importance_sampling_level in ("sequence", "geometric_mean"):
        problem = (
            f"gives an advantage per token; {algorithm.name} has one ratio and one advantage per"
            " response"
        )
        raise ConfigError(key, value, problem, "set algorithm.name: gspo_token")


def _check_names(distillation: DistillationConfig) -> None:
    """Several teachers have names, and keys of their own."""
    if distillation.teacher is not None:
        problem = "and distillation.teachers both name teachers"
        fix = "move it into distillation.teachers"
        raise ConfigError("distillation.teacher", distillation.teacher, problem, fix)
    servers = list(field_types(TeacherServersConfig))
    for key in servers:
        value = getattr(distillation, key)
        if value != default_of(DistillationConfig, key):
            problem = "is a key of each teacher with distillation.teachers"
            fix = "move it into distillation.teachers"
            raise ConfigError(f"distillation.{key}", value, problem, fix)
    counts = Counter(teacher.name for teacher in distillation.teachers)
    for name, count in counts.items():
        key = "distillation.teachers.name"
        if not METRIC_NAME.fullmatch(name):
            problem = "is no name for metrics"
            raise ConfigError(key, name, problem, "use letters, digits, - and _")
        if count > 1:
            raise ConfigError(key, name, "names two teachers", "rename one of them")


def _check_choice(distillation: DistillationConfig, data: DataConfig) -> None:
    """Where the sources of the prompts choose the teacher, each is the name of one."""
    if distillation.teacher_field is not None:
        return
    key = "distillation.teacher_field"
    names = list(distillation.by_name)
    if not data.sources:
        problem = "must name the field of a prompt that holds the name of its teacher"
        fix = "set it, or name the data.sources as the teachers"
        raise ConfigError(key, None, problem, fix)
    sources = [source.name for source in data.sources]
    for source in sources:
        if source not in names:
            problem = f"takes data.sources as names of teachers, and {source} is none of"
            fix = "name it as its teacher, or set the key to a field of the prompts"
            raise ConfigError(key, None, f"{problem} {', '.join(names)}", fix)
    for name in names:
        if name not in sources:
            problem = f"no data.sources is named {name}"
            fix = "remove the teacher, or set distillation.teacher_field"
            raise ConfigError("distillation.teachers.name", name, problem, fix)


def _check_urls(
    teacher: TeacherConfig, distillation: DistillationConfig, rollout: RolloutConfig
) -> None:
    key = f"{teacher.prefix}.urls"
    check_urls(key, teacher.urls)
    if not teacher.urls:
        _refuse_set(teacher, ["engine", "api_key_file"], f"without {key}", teacher.prefix)
        return
    if distillation.takes_all_ids:
        problem = "needs the teacher's hidden states, which servers do not give"
        fix = f"set a number, or remove {key}"
        raise ConfigError("distillation.top_k", distillation.top_k, problem, fix)
    if rollout.temperature != 1.0:
        problem = f"servers score given tokens at temperature 1, with {key}"
        fix = f"set it to 1, or remove {key}"
        raise ConfigError("rollout.temperature", rollout.temperature, problem, fix)


def check_teacher_model(teacher: TeacherConfig, hf: HFConfig, policy: HFConfig) -> None:
    """The teacher scores every token of the policy.

    Args:
        hf, policy: the config.json of the teacher and of the policy.
    """
    for name, words in (("vocab_size", "a vocabulary"), ("max_position_embeddings", "positions")):
        if (value := hf.get(name)) is not None and value < policy.get(name, 0):
            problem = f"has {words} of {value}, the policy of {policy[name]}"
            fix = "use a teacher with the policy's tokenizer and length"
            raise ConfigError(f"{teacher.prefix}.teacher", teacher.teacher, problem, fix)


def check_top_k(distillation: DistillationConfig, policy: HFConfig) -> None:
    """The policy has so many ids. policy: its config.json."""
    if distillation.num_ids and distillation.num_ids > policy["vocab_size"]:
        problem = f"the policy has {policy['vocab_size']} ids"
        raise ConfigError(
            "distillation.top_k", distillation.top_k, problem, "lower it, 32 is usual"
        )
