"""Finished runs by variant, setting and seed, and the figures of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_gspo.config.load import flat
from megatron_gspo.tools.compare.run_records import Figures, ReportError, Run, figures, read_run
from megatron_gspo.tools.compare.search import Trial, choices, table
from megatron_gspo.tools.compare.statistics import Difference, Interval, holm, interval, paired_difference
from megatron_gspo.tools.compare.study_plan import (
    BASE,
    SEARCH,
    Comparison,
    Expectation,
    report_runs,
    search_runs,
)

STATUSES = ("finished", "failed", "partial", "missing")
# What the report compares, as (attribute of Figures, words); the first is the one that conclusions go by.
MEASURES = (
    ("final_accuracy", "held-out accuracy at the end"),
    ("mean_accuracy", "held-out accuracy, mean over the run"),
    ("reward", "training reward, last tenth of the steps"),
    ("largest_fall", "largest fall of the accuracy below its own best"),
    ("clean_accuracy", "held-out accuracy at the end, without router noise"),
)


# Starts of keys that change no result: where a run writes, what it logs and keeps, how its servers are reached. Runs
# that differ in these alone are one variant.
_WITHOUT_EFFECT = (
    "run_dir",
    "seed",
    "tracking.",
    "checkpoint.",
    "guard.",
    "data.cache_dir",
    "data.verifier_timeout",
    "data.verifier_workers",
    "sglang.",
    "vllm.",
)
# Starts of keys, the most telling first, by which variants of one algorithm are named.
_TELLING = (
    "model.",
    "optimizer.lr",
    "optimizer.",
    "algorithm.",
    "routing.",
    "router_noise.",
    "lora.",
    "critic.",
    "rollout.",
    "training.",
    "data.",
    "evaluation.",
)
# Keys that make accuracies incomparable where they differ.
_SAME_TASK = (
    "model.path",
    "data.prompts",
    "data.eval_prompts",
    "data.task.",
    "data.verifier",
    "rollout.max_response_length",
    "training.steps",
    "evaluation.",
)


@dataclass(frozen=True)
class Group:
    """A variant as the report names it. overrides: every key that it sets beyond the base config."""

    name: str
    label: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """`base` or a stress."""

    name: str
    about: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """All that a report is made of.

    runs: of the report, missing ones included. trials: the search's table, and chosen its outcome. tuned_as: variants
    that took another one's choice.
    shared: keys that every run sets beyond the base config. command: makes the report again. expected: of the file.
    notes: what a reader must know before the results, one sentence each.
    """

    title: str
    groups: list[Group]
    settings: list[Setting]
    seeds: list[int]
    baseline: str
    runs: list[Run]
    command: str
    base: str = ""
    shared: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    trial_runs: list[Run] = field(default_factory=list)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned_as: dict[str, str] = field(default_factory=dict)
    search_overrides: dict[str, Any] = field(default_factory=dict)
    expected: Sequence[Expectation] = ()
    notes: Sequence[str] = ()

    def of(self, setting: str, group: str) -> list[Run]:
        return [run for run in self.runs if run.setting == setting and run.variant == group]

    def groups_in(self, setting: str) -> list[Group]:
        present = {run.variant for run in self.runs if run.setting == setting}
        return [group for group in self.groups if group.name in present]

    def label(self, name: str) -> str:
        return next((group.label for group in self.groups if group.name == name), name)


@dataclass(frozen=True)
class Row:
    """One variant under one setting.

    counts: runs by status, and `collapsed` beside them. broken: runs that failed or collapsed or both. converged: that
    finished, didn't collapse and ended above the accuracy that they began with. by_seed: of the runs that are over.
    """

    group: str
    counts: dict[str, int]
    broken: int
    converged: int
    measures: dict[str, Interval | None]
    seconds: Interval | None
    by_seed: dict[int, Figures]


def read_study(comparison: Comparison, command: str) -> Study:
    """The runs of a comparison file as they lie in its folder, finished or not."""
    config = comparison.config
    trial_runs = [
        read_run(spec.run_dir, setting=SEARCH, variant=spec.variant, seed=spec.seed, trial=spec.trial)
        for spec in search_runs(comparison)
    ]
    trials = table(trial_runs)
    chosen = choices(config, trials)
    runs = [
        read_run(spec.run_dir, setting=spec.setting, variant=spec.variant, seed=spec.seed)
        for spec in report_runs(comparison, chosen)
    ]
    groups = [Group(v.name, v.label or v.name, {**v.overrides, **chosen.get(v.name, {})}) for v in config.variants]
    settings = [Setting(BASE, "", {}), *(Setting(s.name, s.about, s.overrides) for s in config.stress)]
    return Study(
        config.title, groups, settings, list(config.seeds), config.baseline, runs, command,
        base=str(comparison.base_file), shared=dict(config.overrides), trials=trials, trial_runs=trial_runs,
        chosen=chosen, tuned_as={v.name: v.tuned_as for v in config.variants if v.tuned_as is not None},
        search_overrides=dict(config.search.overrides) if config.search else {}, expected=config.expect,
    )  # fmt: skip


def study_of(run_dirs: Sequence[str | Path], command: str, *, baseline: str | None = None) -> Study:
    """Run directories alone: runs that differ only in seed form a variant.

    baseline: a variant's name, `grpo` by default where there is one, else the first. Raises ReportError for a
    directory without a run, a seed that a variant has twice, and an unknown baseline.
    """
    found: list[tuple[dict[str, Any], Run]] = []
    for path in {Path(path).resolve(): path for path in run_dirs}.values():  # one named twice counts once
        run = read_run(path, setting=BASE, variant="")
        if run.status == "missing" or not run.config:
            raise ReportError(f"{path}: is not a run directory (no config.yaml of a run); correct the path")
        found.append((_settings_of(run.config), run))
    kinds: list[dict[str, Any]] = []
    for settings, _ in found:
        if settings not in kinds:
            kinds.append(settings)
    names = _names(kinds)
    runs = [replace(run, variant=names[kinds.index(settings)]) for settings, run in found]
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        earlier = seen.setdefault((run.variant, run.seed), run.run_dir)
        if earlier != run.run_dir:
            raise ReportError(
                f"{run.run_dir}: same settings and seed {run.seed} as {earlier}, "
                "but for keys that change no result; name one of them"
            )
    chosen = baseline or ("grpo" if "grpo" in names else names[0])
    if chosen not in names:
        raise ReportError(f"baseline = {chosen}: is not a variant; set one of {', '.join(names)}")
    varying = _varying(kinds)
    groups = [
        Group(name, name, {key: kind.get(key) for key in varying}) for name, kind in zip(names, kinds, strict=True)
    ]
    seeds = sorted({run.seed for run in runs})
    notes = [*_unfinished(runs), *_incomparable(kinds)]
    return Study("Finished runs", groups, [Setting(BASE, "", {})], seeds, chosen, runs, command, notes=notes)


def rows(study: Study, setting: str) -> list[Row]:
    """The headline table of a setting."""
    found = []
    for group in study.groups_in(setting):
        runs = study.of(setting, group.name)
        over = [run for run in runs if run.status in ("finished", "failed")]
        numbers = {run.seed: figures(run) for run in over}
        counts = {status: sum(run.status == status for run in runs) for status in STATUSES}
        counts["collapsed"] = sum(item.collapsed for item in numbers.values())
        broken = sum(run.status == "failed" or numbers[run.seed].collapsed for run in over)
        converged = sum(run.status == "finished" and _ended_well(numbers[run.seed]) for run in over)
        measures = {name: _interval(study, setting, group.name, name) for name, _ in MEASURES}
        times = [numbers[run.seed].seconds for run in over if run.status == "finished"]
        seconds = [value for value in times if value]
        took = interval(seconds) if seconds else None
        found.append(Row(group.name, counts, broken, converged, measures, took, numbers))
    return found


def _ended_well(item: Figures) -> bool:
    start, end = item.start_accuracy, item.final_accuracy
    return not item.collapsed and (start is None or end is None or end > start)


def differences(study: Study, setting: str, measure: str, baseline: str | None = None) -> dict[str, Difference]:
    """Each variant less the baseline, paired by seed; Holm's correction over the variants of this setting."""
    reference = baseline or study.baseline
    base = values(study, setting, reference, measure)
    found = {}
    for group in study.groups_in(setting):
        if group.name != reference:
            difference = paired_difference(values(study, setting, group.name, measure), base)
            if difference is not None:
                found[group.name] = difference
    adjusted = holm([item.p_t for item in found.values()])
    return {name: replace(item, p_holm=p) for (name, item), p in zip(found.items(), adjusted, strict=True)}


def values(study: Study, setting: str, group: str, measure: str) -> dict[int, float]:
    """The measure by seed. A failed run counts with what it had last; one that isn't over doesn't count."""
    found = {}
    for run in study.of(setting, group):
        value = getattr(figures(run), measure) if run.status in ("finished", "failed") else None
        if value is not None:
            found[run.seed] = float(value)
    return found


def _interval(study: Study, setting: str, group: str, measure: str) -> Interval | None:
    known = list(values(study, setting, group, measure).values())
    return interval(known) if known else None


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys that make a run's variant."""
    return {key: value for key, value in flat(config).items() if not key.startswith(_WITHOUT_EFFECT)}


def _unfinished(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run that isn't over."""
    sentences = []
    for run in runs:
        if run.status == "partial":
            last = int(run.records[-1]["step"]) if run.records else 0
            steps = run.config.get("training", {}).get("steps", "?")
            sentences.append(
                f"{run.run_dir} is not finished (step {last} of {steps}): its curve is shown, it is not compared."
            )
    return sentences


def _incomparable(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence, if the variants differ in what their accuracies are of."""
    differing = [key for key in _varying(kinds) if key.startswith(_SAME_TASK)]
    if not differing:
        return []
    shown = "; ".join(f"{key} {', '.join(_distinct(kinds, key))}" for key in differing[:3])
    more = f" and {len(differing) - 3} more keys" if len(differing) > 3 else ""
    return [f"The variants differ in {shown}{more}: differences of their accuracies are not of the algorithm alone."]


def _distinct(kinds: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(str(kind.get(key)) for kind in kinds))


def _varying(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys that aren't the same in all settings, in their order."""
    keys = list(dict.fromkeys(key for kind in kinds for key in kind))
    return [key for key in keys if any(kind.get(key) != kinds[0].get(key) for kind in kinds)]


def _names(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each variant from algorithm, replay and old log-probs; where these are equal, with as many of the keys
    that differ as tell them apart, the most telling first. The report lists all keys."""
    roles = [_role_name(kind) for kind in kinds]
    names = []
    for name, kind in zip(roles, kinds, strict=True):
        alike = [other for other, its in zip(kinds, roles, strict=True) if its == name]
        more = [f"{key.rpartition('.')[2]}={_shown(alike, key, kind)}" for key in _telling_keys(alike)]
        names.append(" ".join([name, *more]))
    return names


def _role_name(kind: Mapping[str, Any]) -> str:
    words = [str(kind.get("algorithm.name", "run"))]
    replay = kind.get("routing.replay", "none")
    if replay != "none":
        words.append(str(replay))
    if kind.get("algorithm.old_log_probs") == "rollout":
        words.append("rollout")
    return "_".join(words)


def _telling_keys(alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """As few of the keys that differ as tell all variants apart. A key that adds nothing is left out."""
    chosen: list[str] = []
    for key in sorted(_varying(alike), key=_rank):
        told_apart = _count_distinct(alike, chosen)
        if told_apart == len(alike):
            break
        if _count_distinct(alike, [*chosen, key]) > told_apart:
            chosen.append(key)
    return chosen


def _count_distinct(alike: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(str(kind.get(key)) for key in keys) for kind in alike})


def _rank(key: str) -> int:
    return next((rank for rank, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING))


def _shown(alike: Sequence[Mapping[str, Any]], key: str, kind: Mapping[str, Any]) -> str:
    """A value in a name; of a path, as many of its last folders as tell it from the others."""
    value = kind.get(key)
    if not isinstance(value, str) or "/" not in value:
        return str(value)
    others = {str(other.get(key)) for other in alike} - {value}
    folders = value.rstrip("/").split("/")
    for count in range(1, len(folders)):
        tail = "/".join(folders[-count:])
        if not any(other.rstrip("/").endswith("/" + tail) or other == tail for other in others):
            return tail
    return value
