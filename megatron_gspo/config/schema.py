"""The whole config: its sections, how it is loaded and what proves that it can work."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from megatron_gspo.config import checks
from megatron_gspo.config.base import MISSING, ConfigError, Section
from megatron_gspo.config.load import apply_overrides, read_file
from megatron_gspo.config.reference import choices, describe_type, keys, section_of
from megatron_gspo.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrackingConfig,
    TrainingConfig,
)
from megatron_gspo.config.sglang_section import SGLangConfig
from megatron_gspo.config.task_sections import AlgorithmConfig, DataConfig, RolloutConfig, RoutingConfig


class Config(Section):
    """A run. Build it with load_config or Config.from_dict; both raise ConfigError."""

    seed: int = Field(1234, ge=0, description="Seed of weights, prompt order and sampling.")
    run_dir: str = Field(description="Directory of everything the run writes.")
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    data: DataConfig
    rollout: RolloutConfig
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    training: TrainingConfig
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """Validate plain data: keys, types, bounds and every choice that contradicts another.

        Raises ConfigError for the first fault found. What depends on the number of processes or on files is
        left to `check`.
        """
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise _first_fault(cls, error) from None
        checks.check_choices(config)
        return config

    def check(self, world_size: int) -> None:
        """Prove that the run can start on world_size processes: layout, batches, model and files.

        Raises ConfigError.
        """
        checks.check_layout(self.parallel, world_size)
        checks.check_batches(self, world_size)
        checks.check_model(self, checks.read_hf_config(self.model.path))
        checks.check_files(self)

    def dump(self) -> dict[str, Any]:
        """Plain data, every default written out; from_dict(dump()) is the same config."""
        return self.model_dump(mode="python")

    def to_yaml(self) -> str:
        """`dump` as YAML text."""
        return yaml.safe_dump(self.dump(), sort_keys=False, allow_unicode=True)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the length of the learning-rate schedule."""
        per_epoch = self.rollout.sequences // self.training.global_batch_size
        return self.training.steps * self.training.epochs * per_epoch


def load_config(path: str | Path, overrides: Sequence[str] = (), *, server_arguments: Sequence[str] = ()) -> Config:
    """Load a YAML file, apply `key.sub=value` overrides and validate. Raises ConfigError.

    server_arguments: added to sglang.arguments, where they win over the file's.
    """
    data = read_file(path)
    data.pop("environment", None)  # a run's own config.yaml says there where it ran
    data = apply_overrides(data, overrides)
    if server_arguments:
        section = data.setdefault("sglang", {})
        if isinstance(section, dict) and isinstance(section.setdefault("arguments", []), list):
            section["arguments"] = [*section["arguments"], *server_arguments]
    return Config.from_dict(data)


def _first_fault(model: type[Section], error: ValidationError) -> ConfigError:
    """A pydantic error in our words. Unknown keys come first: they often explain a missing one."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    key, field = _locate(model, fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = [row.name for row in keys(model)] + list(model.model_fields)
        return ConfigError(key, fault["input"], "is not a key", _suggest(key, known))
    if fault["type"] == "missing":
        return ConfigError(key, MISSING, "is missing", f"set it: {_expected(field)}")
    words = choices(field) if field is not None else []
    close = difflib.get_close_matches(str(fault["input"]), words, n=1)
    hint = f", perhaps {close[0]}" if close else ""
    quoted = ", without quotes" if isinstance(fault["input"], str) and not words else ""
    return ConfigError(key, fault["input"], "is not allowed", f"set {_expected(field)}{hint}{quoted}")


def _locate(model: type[Section], location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Dotted key and field of a pydantic location, less the union branches that pydantic adds."""
    parts: list[str] = []
    field = None
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            break
        parts.append(str(part))
        field = current.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            break
        current = section_of(field.annotation)
    return ".".join(parts) or "config", field


def _expected(field: Any) -> str:
    if field is None:
        return "a mapping of keys"
    section = section_of(field.annotation)
    if section is None:
        return describe_type(field)
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return "a section" + (f" with at least {', '.join(required)}" if required else "")


def _suggest(key: str, known: list[str]) -> str:
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = (
        same_leaf
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
        or [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)]
    )
    return f"did you mean {close[0]}?" if close else "remove it, or see docs/config.md for the keys"
