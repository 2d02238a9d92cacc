"""The comparison file (variants, settings, seeds), its checks, and the list of its runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt, MinLen

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.config_error import MISSING, show
from megatron_gspo.config.load import apply_overrides, parse_yaml, read_file
from megatron_gspo.config.paths import UserPath, expand_paths
from megatron_gspo.config.validate import STRICT, validate

BASE = "base"  # the setting without stress
SEARCH = "search"
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
    clip: tuple[tuple[float, float], ...] = ()
    """Clip ranges (epsilon_low, epsilon_high) that the search tries."""
    candidates: tuple[Overrides, ...] = ()
    """In place of `clip`, for an objective without a clip range: settings that the search tries, as dotted keys."""
    tuned_as: str | None = None
    """Variant whose search result is used in place of an own search."""

    @property
    def searched(self) -> tuple[Overrides, ...]:
        """What the search tries with each learning rate."""
        ranges = ({"algorithm.epsilon_low": low, "algorithm.epsilon_high": high} for low, high in self.clip)
        return self.candidates or tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class Stress:
    """A setting in which the variants run again."""

    name: str
    """Short name, used for folders."""
    about: str = ""
    """One line for the report."""
    overrides: Overrides
    """Keys of the training config, dotted; they win over the variant's."""
    variants: tuple[str, ...] | None = None
    """Only these variants; null is all."""
    seeds: tuple[int, ...] | None = None
    """Only these seeds; null is all."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search of clip range and learning rate."""

    seeds: tuple[int, ...]
    """Seeds of the trials; none may be a seed of the report."""
    lr: tuple[float, ...]
    """Learning rates that are tried with each clip range."""
    overrides: Overrides = field(default_factory=dict)
    """Keys of the training config for the trials only, e.g. fewer training.steps."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A difference that is expected before the runs; the report decides whether it holds."""

    higher: str
    """Variant that is expected to end higher."""
    lower: str
    """Variant that is expected to end lower."""
    points: Annotated[float, Gt(0)]
    """Least difference of the held-out accuracy at the end, mean over the seeds that both have, in points."""


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
    """Keys for every run, dotted."""
    variants: Annotated[tuple[Variant, ...], MinLen(1)]
    baseline: str
    """Name of the variant that the others are compared with."""
    seeds: Annotated[tuple[int, ...], MinLen(1)]
    """Seeds of the report, the same for every variant."""
    processes: Annotated[int, Ge(1)] = 1
    """Processes of each run."""
    stress: tuple[Stress, ...] = ()
    expect: tuple[Expectation, ...] = ()
    """Differences without stress that the report decides about first."""
    search: Search | None = None
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
    """One run: its place in the comparison and its overrides of the base config.

    setting: `base`, the name of a stress, or `search`. trial: the values of the search, otherwise empty.
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
        """The cold start's weights; None if the base config names the model."""
        return str(ColdStartFiles(self.folder).weights) if self.config.cold_start else None


def load_comparison(file: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read and check a comparison file; `key=value` overrides its top-level keys. Raises ConfigError."""
    data = apply_overrides(read_file(file), overrides)
    config = expand_paths(validate(ComparisonConfig, data, page="docs/comparison.md"))
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

    chosen: result of the search for each variant; applied after the variant's overrides and before the stress's.
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
    """The values that the search tries for one variant."""
    if config.search is None or variant.tuned_as is not None:
        return []
    return [{**tried, "optimizer.lr": lr} for tried, lr in itertools.product(variant.searched, config.search.lr)]


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
    """A value as an override: YAML on one line; a string that YAML would read as another type is quoted."""
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
                raise ConfigError(f"{key}.name", name, "is not a folder name", fix)
            if given.count(name) > 1:
                raise ConfigError(f"{key}.name", name, "appears twice", "give each its own name")
    for key, name in [("baseline", config.baseline), *_named_variants(config)]:
        if name not in names:
            raise ConfigError(key, name, "is not a variant", f"set one of {', '.join(names)}")
    for seeds in (config.seeds, *(stress.seeds or () for stress in config.stress)):
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
    named += [(f"expect.{key}", getattr(e, key)) for e in config.expect for key in ("higher", "lower")]
    return named + [(f"stress.{s.name}.variants", name) for s in config.stress for name in s.variants or ()]


def _check_search(config: ComparisonConfig) -> None:
    """Equal numbers of trials for all searched variants, on seeds that the report does not use."""
    if config.search is None:
        for variant in config.variants:
            given = next((key for key in ("clip", "candidates", "tuned_as") if getattr(variant, key)), None)
            if given is not None:
                key = f"variants.{variant.name}.{given}"
                raise ConfigError(key, MISSING, "has no effect without search", "add search, or remove it")
        return
    used = {seed for stress in config.stress for seed in stress.seeds or ()} | set(config.seeds)
    for seed in config.search.seeds:
        if seed in used:
            problem = "is also a seed of the report, so the choice would be evaluated on its own data"
            raise ConfigError("search.seeds", seed, problem, "choose another")
    searched = [variant for variant in config.variants if variant.tuned_as is None]
    for variant in searched:
        count, other = len(variant.searched), len(searched[0].searched)
        if count != other or not count:
            problem = f"gives {count} clip ranges or candidates and {searched[0].name} {other}"
            fix = "give every searched variant the same number, at least one; or set tuned_as"
            raise ConfigError(f"variants.{variant.name}.clip", show(variant.clip), problem, fix)
        if variant.clip and variant.candidates:
            key = f"variants.{variant.name}.candidates"
            raise ConfigError(key, show(variant.candidates), "clip is given too", "set one of them")
    for variant in config.variants:
        if variant.tuned_as is not None and variant.tuned_as not in {v.name for v in searched}:
            key = f"variants.{variant.name}.tuned_as"
            raise ConfigError(key, variant.tuned_as, "is not searched itself", "name one that is")
