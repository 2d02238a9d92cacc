"""The comparison file: variants, settings and seeds; and the list of its runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.config_error import MISSING, show
from megatron_gspo.config.load import apply_overrides, parse_yaml, read_file

BASE = "base"  # the setting without stress
SEARCH = "search"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
# Keys that the comparison sets for each run.
RESERVED = ("run_dir", "seed", "model.path")

Overrides = dict[str, Any]


class Section(BaseModel):
    """Refuses unknown keys, coerces no type and is frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Variant(Section):
    name: str = Field(description="Short name, used for folders: lower-case letters, digits, underscores.")
    label: str = Field("", description="Name in the report; empty is name.")
    overrides: Overrides = Field(default_factory=dict, description="Keys of the training config, dotted.")
    clip: list[tuple[float, float]] = Field(
        default_factory=list, description="Clip ranges (epsilon_low, epsilon_high) that the search tries."
    )
    tuned_as: str | None = Field(
        None, description="Takes what the search chose for this other variant instead of a search of its own."
    )


class Stress(Section):
    name: str = Field(description="Short name, used for folders.")
    about: str = Field("", description="One line for the report.")
    overrides: Overrides = Field(description="Keys of the training config, dotted; on top of the variant's.")
    variants: list[str] | None = Field(None, description="Only these variants; null is all.")
    seeds: list[int] | None = Field(None, description="Only these seeds; null is all.")


class Search(Section):
    seeds: list[int] = Field(description="Seeds of the trials; none of them may be a seed of the report.")
    lr: list[float] = Field(description="Learning rates that are tried with each clip range.")
    overrides: Overrides = Field(
        default_factory=dict, description="Keys for the trials only, e.g. fewer training.steps."
    )


class ModelSize(Section):
    """Sizes of the random model of the cold start (tools/make_tiny_model)."""

    hidden: int = Field(128, ge=1)
    layers: int = Field(4, ge=1)
    experts: int = Field(16, ge=1)
    experts_per_token: int = Field(4, ge=1)
    expert_width: int = Field(48, ge=1)


class ColdStart(Section):
    config: str = Field(description="Training config of the supervised start, relative to this file.")
    overrides: Overrides = Field(default_factory=dict, description="Keys of that config, dotted.")
    model: ModelSize = Field(default_factory=ModelSize)
    processes: int = Field(1, ge=1, description="Processes of the supervised start.")


class ComparisonConfig(Section):
    """A comparison file. Build it with load_comparison, which raises ConfigError."""

    title: str = Field("Comparison", description="Heading of the report.")
    folder: str = Field(description="Where runs and report are written.")
    base: str = Field(description="Training config that every run starts from, relative to this file.")
    overrides: Overrides = Field(default_factory=dict, description="Keys for every run, dotted.")
    variants: list[Variant] = Field(min_length=1)
    baseline: str = Field(description="Name of the variant that the others are compared with.")
    seeds: list[int] = Field(min_length=1, description="Seeds of the report; the same for every variant.")
    processes: int = Field(1, ge=1, description="Processes of each run.")
    stress: list[Stress] = Field(default_factory=list)
    search: Search | None = None
    cold_start: ColdStart | None = Field(
        None, description="Make the starting weights first; null takes the base config's model.path."
    )


@dataclass(frozen=True)
class ColdStartFiles:
    """Paths of a cold start's files."""

    folder: Path

    @property
    def model(self) -> Path:
        """The random model that it begins with."""
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
    """One run: where it belongs and what it overrides in the base config.

    setting: `base`, a stress's name or `search`. trial: the search's values, empty elsewhere.
    """

    setting: str
    variant: str
    seed: int
    run_dir: Path
    overrides: Overrides
    trial: Overrides = field(default_factory=dict)

    @property
    def name(self) -> str:
        shown = " ".join(f"{key.rpartition('.')[2]}={value:g}" for key, value in self.trial.items())
        return " ".join(part for part in (self.setting, self.variant, shown, f"seed {self.seed}") if part)


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

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.config.variants if variant.name == name)

    @property
    def model_path(self) -> str | None:
        """The cold start's weights, None where the base config names the model."""
        return str(ColdStartFiles(self.folder).weights) if self.config.cold_start else None


def load_comparison(file: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read and check a comparison file; `key=value` overrides its top-level keys. Raises ConfigError."""
    data = apply_overrides(read_file(file), overrides)
    try:
        config = ComparisonConfig.model_validate(_with_tuples(data))
    except ValidationError as error:
        raise _fault(error) from None
    comparison = Comparison(config, Path(file))
    _check_names(config)
    _check_search(config)
    for spec in (*report_runs(comparison, {}), *search_runs(comparison)):
        try:
            resolve(comparison, spec)
        except ConfigError as error:
            problem = f"{error.problem} (in run {spec.name})"
            raise ConfigError(error.key, error.value, problem, error.fix) from None
    return comparison


def report_runs(comparison: Comparison, chosen: Mapping[str, Overrides]) -> list[RunSpec]:
    """Every run of the report, seeds outermost so that all variants advance together.

    chosen: what the search found for each variant; it comes after the variant's own overrides and before the
    stress's.
    """
    config, specs = comparison.config, []
    settings = [(BASE, {}, None, None), *((s.name, s.overrides, s.variants, s.seeds) for s in config.stress)]
    for setting, stress, variants, seeds in settings:
        for seed in config.seeds if seeds is None else seeds:
            for variant in config.variants:
                if variants is not None and variant.name not in variants:
                    continue
                overrides = {**config.overrides, **variant.overrides, **chosen.get(variant.name, {}), **stress}
                folder = comparison.folder / "runs" / setting / variant.name / f"seed_{seed}"
                specs.append(RunSpec(setting, variant.name, seed, folder, overrides))
    return specs


def search_runs(comparison: Comparison) -> list[RunSpec]:
    """The trials: for each searched variant every clip range with every learning rate and search seed."""
    config, specs = comparison.config, []
    if config.search is None:
        return []
    for seed in config.search.seeds:
        for variant in config.variants:
            for number, trial in enumerate(trials(config, variant)):
                overrides = {**config.overrides, **variant.overrides, **config.search.overrides, **trial}
                folder = comparison.folder / "runs" / SEARCH / variant.name / f"trial_{number}" / f"seed_{seed}"
                specs.append(RunSpec(SEARCH, variant.name, seed, folder, overrides, trial))
    return specs


def trials(config: ComparisonConfig, variant: Variant) -> list[Overrides]:
    """The search's values for one variant, none where it isn't searched."""
    if config.search is None or variant.tuned_as is not None:
        return []
    return [
        {"algorithm.epsilon_low": low, "algorithm.epsilon_high": high, "optimizer.lr": lr}
        for (low, high), lr in itertools.product(variant.clip, config.search.lr)
    ]


def resolve(comparison: Comparison, spec: RunSpec) -> Config:
    """The training config of a run. Raises ConfigError."""
    return load_config(comparison.base_file, as_arguments(comparison, spec))


def as_arguments(comparison: Comparison, spec: RunSpec) -> list[str]:
    """The run's `key=value` arguments for megatron_gspo.train."""
    values = {"run_dir": str(spec.run_dir), "seed": spec.seed}
    if comparison.model_path is not None:
        values["model.path"] = comparison.model_path
    return [f"{key}={argument(value)}" for key, value in {**spec.overrides, **values}.items()]


def argument(value: Any) -> str:
    """A value as an override spells it: YAML on one line; a text that YAML would take for something else is quoted."""
    if isinstance(value, str):
        try:
            return value if parse_yaml(value, "value") == value else json.dumps(value)
        except ConfigError:
            return json.dumps(value)
    return json.dumps(value)


def _check_names(config: ComparisonConfig) -> None:
    names = [variant.name for variant in config.variants]
    settings = [BASE, SEARCH, *(stress.name for stress in config.stress)]
    for key, given in (("variants", names), ("stress", settings)):
        for name in given:
            if not _NAME.fullmatch(name):
                fix = "use lower-case letters, digits and underscores"
                raise ConfigError(f"{key}.name", name, "is no name for a folder", fix)
            if given.count(name) > 1:
                raise ConfigError(f"{key}.name", name, "appears twice", "give each its own name")
    for key, name in [("baseline", config.baseline), *_named_variants(config)]:
        if name not in names:
            raise ConfigError(key, name, "is no variant", f"set one of {', '.join(names)}")
    for seeds in (config.seeds, *(stress.seeds or [] for stress in config.stress)):
        for seed in seeds:
            if seeds.count(seed) > 1:
                raise ConfigError("seeds", seed, "appears twice", "give each seed once")
    groups = [("overrides", config.overrides), *((f"variants.{v.name}", v.overrides) for v in config.variants),
              *((f"stress.{s.name}", s.overrides) for s in config.stress)]  # fmt: skip
    for key, overrides in groups:
        for reserved in RESERVED:
            if reserved in overrides and (reserved != "model.path" or config.cold_start is not None):
                problem = f"{reserved} is set by the comparison"
                raise ConfigError(f"{key}.{reserved}", overrides[reserved], problem, "remove it")


def _named_variants(config: ComparisonConfig) -> list[tuple[str, str]]:
    named = [(f"variants.{v.name}.tuned_as", v.tuned_as) for v in config.variants if v.tuned_as is not None]
    return named + [(f"stress.{s.name}.variants", name) for s in config.stress for name in s.variants or ()]


def _check_search(config: ComparisonConfig) -> None:
    """Equal trials for every algorithm, on seeds that the report doesn't use."""
    if config.search is None:
        for variant in config.variants:
            if variant.clip or variant.tuned_as:
                key = f"variants.{variant.name}.{'clip' if variant.clip else 'tuned_as'}"
                raise ConfigError(key, MISSING, "has no effect without search", "add search, or remove it")
        return
    used = {seed for stress in config.stress for seed in stress.seeds or ()} | set(config.seeds)
    for seed in config.search.seeds:
        if seed in used:
            problem = "is a seed of the report too: the choice would be judged on what it was made with"
            raise ConfigError("search.seeds", seed, problem, "take another")
    searched = [variant for variant in config.variants if variant.tuned_as is None]
    for variant in searched:
        if len(variant.clip) != len(searched[0].clip) or not variant.clip:
            problem = f"gives {len(variant.clip)} clip ranges and {searched[0].name} {len(searched[0].clip)}"
            fix = "give every searched variant the same number, at least one; or set tuned_as"
            raise ConfigError(f"variants.{variant.name}.clip", show(variant.clip), problem, fix)
    for variant in config.variants:
        if variant.tuned_as is not None and variant.tuned_as not in {v.name for v in searched}:
            key = f"variants.{variant.name}.tuned_as"
            raise ConfigError(key, variant.tuned_as, "is not searched itself", "name one that is")


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    """Clip ranges come from YAML as lists; strict validation wants the pairs as tuples."""
    variants = data.get("variants")
    if isinstance(variants, list):
        for variant in variants:
            if isinstance(variant, dict) and isinstance(variant.get("clip"), list):
                variant["clip"] = [
                    tuple(float(x) if isinstance(x, int) else x for x in pair) if isinstance(pair, list) else pair
                    for pair in variant["clip"]
                ]
    return data


def _fault(error: ValidationError) -> ConfigError:
    """The first fault; unknown keys come first, because they often explain a missing one."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return ConfigError(key, fault["input"], "is not a key", "remove it, or see docs/comparison.md")
    if fault["type"] == "missing":
        return ConfigError(key, MISSING, "is missing", "set it; docs/comparison.md has an example")
    return ConfigError(key, fault["input"], "is not allowed", fault["msg"][0].lower() + fault["msg"][1:])
