"""Checks of `rollout.quantization`. Each raises ConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.quantization_section import QuantizationConfig
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.model_shape import ModelError

if TYPE_CHECKING:
    from megatron_gspo.models.quantization.plan import QuantizationPlan

KEY = "rollout.quantization"


def check_quantization(rollout: RolloutConfig) -> None:
    """The keys have an effect."""
    section = rollout.quantization
    if section.is_on and rollout.engine == "sft":
        problem = "reference answers (rollout.engine: sft) come from no model"
        fix = "set it to none"
        raise ConfigError(f"{KEY}.format", section.format, problem, fix)
    for key, value in (("modules", section.modules), ("exclude", section.exclude)):
        if value and not section.is_on:
            problem = f"has no effect with {KEY}.format = none"
            raise ConfigError(
                f"{KEY}.{key}", list(value), problem, "set a format, or remove the list"
            )


def resolve_quantization(section: QuantizationConfig, hf: HFConfig) -> QuantizationPlan | None:
    """The plan for a model; None without quantization. hf: its config.json. Raises ConfigError for
    lists that do not go with it."""
    if not section.is_on:
        return None
    # These import torch, which a config is read without.
    from megatron_gspo.models.families import family_of
    from megatron_gspo.models.quantization.module_list import ModuleListError
    from megatron_gspo.models.quantization.plan import quantization_plan

    try:
        family, shape = family_of(hf)
    except ModelError:  # has a message of its own
        return None
    if family.stacks_experts:
        problem = (
            f"{family.model_type} checkpoints hold a layer's experts in one tensor, of which no"
            " format is"
        )
        raise ConfigError(f"{KEY}.format", section.format, problem, "set it to none")
    try:
        return quantization_plan(section.format, section.modules, section.exclude, family, shape)
    except ModuleListError as error:
        raise ConfigError(f"{KEY}.{error.key}", error.value, error.problem, error.fix) from None
