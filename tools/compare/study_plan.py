"""The comparison file: variants and seeds, its checks, and the runs that follow from it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt, MinLen

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.load import apply_overrides, parse_yaml, read_file
from megatron_gspo.config.paths import UserPath, expand_paths
from megatron_gspo.config.validate import STRICT, validate

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
# Keys that the comparison sets for each run.
RESERVED = ("run_dir", "seed", "model.path")

Overrides = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One algorithm or setting of the comparison."""

    name: str
    """Short name, used for folders: lower-case letters, digits, underscores."""
    label: str = ""
    """Name in the report; empty is `name`."""
    overrides: Overrides = field(default_factory=dict)
    """Keys of the training config, dotted."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of the random model of the cold start (tools/make_tiny_model)."""

    hidden: Annotated[int, Ge(1)] = 128
    layers: Annotated[int, Ge(1)] = 4
    experts: Annotated[int, Ge(1)] = 16
    experts_per_token: Annotated[int, Ge(1)] = 4
    expert_width: Annotated[int, Ge(1)] = 48
    heads: Annotated[int, Ge(1)] = 4


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Supervised training that makes the starting weights."""

    config: UserPath
    """Training config of the supervised training, relative to the comparison file."""
    overrides: Overrides = field(default_factory=dict)
    """Keys of that config, dotted."""
    model: ModelSize = field(default_factory=ModelSize)
    mistakes: Annotated[float, Ge(0), Lt(1)] = 0.12
    """Share of the demonstrations' characters that are replaced."""
    copies: Annotated[int, Ge(1)] = 1
    """Demonstrations per training prompt, each with mistakes of its own."""
    processes: Annotated[int, Ge(1)] = 1
    """Processes of the supervised training."""


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """A comparison file. Build it with load_comparison, which raises ConfigError."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    title: str = "Comparison"
    """Heading of the report."""
    folder: UserPath
    """Directory of the runs and the report."""
    base: UserPath
    """Training config of every run, relative to the comparison file."""
    overrides: Overrides = field(default_factory=dict)
    """Keys for every run, dotted; a variant's win."""
    variants: Annotated[tuple[Variant, ...], MinLen(1)]
    baseline: str
    """Name of the variant that the others are compared with."""
    seeds: Annotated[tuple[int, ...], MinLen(1)]
    """The same for every variant."""
    processes: Annotated[int, Ge(1)] = 1
    """Processes of each run."""
    cold_start: ColdStart | None = None
    """Makes the starting weights first; null uses the base config's model.path."""


@dataclass(frozen=True)
class ColdStartFiles:
    """Paths of a cold start's files."""

    folder: Path

    @property
    def model(self) -> Path:
        """The random model."""
        return self.folder / "model"

    @property
    def demonstrations(self) -> Path:
        return self.folder / "demonstrations.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.jsonl"

    @property
    def run_dir(self) -> Path:
        return self.folder / "cold_start"

    @property
    def weights(self) -> Path:
        """The trained model, in Hugging Face format."""
        return self.run_dir / "hf"


@dataclass(frozen=True)
class RunSpec:
    """One run: its directory and its overrides of the base config."""

    variant: str
    seed: int
    run_dir: Path
    overrides: Overrides

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Comparison:
    """A comparison file and its path."""

    config: ComparisonConfig
    file: Path

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    @property
    def base_file(self) -> Path:
        return self.resolve_path(self.config.base)

    def resolve_path(self, path: str) -> Path:
        """A path given in the comparison file: relative to that file unless it is absolute."""
        return self.file.parent / path

    @property
    def model_path(self) -> str | None:
        """The cold start's weights; None if the base config names the model."""
        return str(ColdStartFiles(self.folder).weights) if self.config.cold_start else None


def load_comparison(file: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read and check a comparison file; `key=value` overrides its keys. Raises ConfigError."""
    data = apply_overrides(read_file(file), overrides)
    config = expand_paths(validate(ComparisonConfig, data, page="docs/comparison.md"))
    comparison = Comparison(config, Path(file))
    _check_names(config)
    for spec in planned_runs(comparison):
        try:
            resolve(comparison, spec)
        except ConfigError as error:
            problem = f"{error.problem} (in run {spec.name})"
            raise ConfigError(error.key, error.value, problem, error.fix) from None
    return comparison


def planned_runs(comparison: Comparison) -> list[RunSpec]:
    """Every run, seeds outermost so that all variants advance together."""
    config = comparison.config
    folder = comparison.folder / "runs" / "base"  # where the runs of earlier versions are
    specs = []
    for seed in config.seeds:
        for variant in config.variants:
            run_dir = folder / variant.name / f"seed_{seed}"
            overrides = {**config.overrides, **variant.overrides}
            specs.append(RunSpec(variant.name, seed, run_dir, overrides))
    return specs


def resolve(comparison: Comparison, spec: RunSpec) -> Config:
    """The training config of a run. Raises ConfigError."""
    return load_config(comparison.base_file, as_arguments(comparison, spec))


def as_arguments(comparison: Comparison, spec: RunSpec) -> list[str]:
    """The run's `key=value` arguments for megatron_gspo.train."""
    values = {"run_dir": str(spec.run_dir), "seed": spec.seed}
    if comparison.model_path is not None:
        values["model.path"] = comparison.model_path
    return arguments_of({**spec.overrides, **values})


def arguments_of(overrides: Overrides) -> list[str]:
    """Overrides as `key=value` arguments."""
    return [f"{key}={argument(value)}" for key, value in overrides.items()]


def argument(value: Any) -> str:
    """A value as an override: YAML on one line; a string that YAML would read as another type
    is quoted.
    """
    if isinstance(value, str):
        try:
            return value if parse_yaml(value, "value") == value else json.dumps(value)
        except ConfigError:
            return json.dumps(value)
    return json.dumps(value)


def _check_names(config: ComparisonConfig) -> None:
    names = [variant.name for variant in config.variants]
    for name in names:
        if not _NAME.fullmatch(name):
            fix = "use lower-case letters, digits and underscores"
            raise ConfigError("variants.name", name, "is not a folder name", fix)
        if names.count(name) > 1:
            raise ConfigError("variants.name", name, "appears twice", "give each its own name")
    if config.baseline not in names:
        fix = f"set one of {', '.join(names)}"
        raise ConfigError("baseline", config.baseline, "is not a variant", fix)
    for seed in config.seeds:
        if config.seeds.count(seed) > 1:
            raise ConfigError("seeds", seed, "appears twice", "give each seed once")
    _check_reserved("overrides", config.overrides, config)
    for variant in config.variants:
        _check_reserved(f"variants.{variant.name}", variant.overrides, config)


def _check_reserved(key: str, overrides: Overrides, config: ComparisonConfig) -> None:
    for reserved in RESERVED:
        if reserved == "model.path" and config.cold_start is None:
            continue
        if reserved in overrides:
            problem = f"{reserved} is set by the comparison"
            raise ConfigError(f"{key}.{reserved}", overrides[reserved], problem, "remove it")
