"""Run directories that no comparison file describes: which of them are one variant, and what to
call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gspo.config.load import flat
from megatron_gspo.tools.compare.run_records import ReportError, Run, read_run
from megatron_gspo.tools.compare.study import Study
from megatron_gspo.tools.compare.study_plan import Variant

Settings = dict[str, Any]  # dotted keys of a config

# Starts of keys that change no result: where a run writes, what it logs and keeps, how its servers
# are reached. Runs that differ in these alone are one variant.
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


def study_of(run_dirs: Sequence[str | Path], command: str, *, baseline: str | None = None) -> Study:
    """Run directories alone: runs that differ only in seed form a variant.

    baseline: a variant's name, `grpo` by default where there is one, else the first. Raises
    ReportError for a directory without a run, a seed that a variant has twice, and an unknown
    baseline.
    """
    runs = _read(run_dirs)
    settings = [_settings_of(run.config) for run in runs]
    distinct: list[Settings] = []
    for each in settings:
        if each not in distinct:
            distinct.append(each)
    names = _names(distinct)
    runs = [
        replace(run, variant=names[distinct.index(each)])
        for run, each in zip(runs, settings, strict=True)
    ]
    _check_seeds(runs)
    baseline = baseline or ("grpo" if "grpo" in names else names[0])
    if baseline not in names:
        raise ReportError(f"baseline = {baseline}: is not a variant; set one of {', '.join(names)}")
    varying = _varying(distinct)
    return Study(
        title="Finished runs",
        variants=[
            Variant(name=name, overrides={key: each.get(key) for key in varying})
            for name, each in zip(names, distinct, strict=True)
        ],
        seeds=sorted({run.seed for run in runs}),
        baseline=baseline,
        runs=runs,
        command=command,
        notes=[*_unfinished(runs), *_incomparable(distinct)],
    )


def _read(run_dirs: Sequence[str | Path]) -> list[Run]:
    """The runs, one that is named twice once."""
    runs = []
    for path in {Path(path).resolve(): path for path in run_dirs}.values():
        run = read_run(path, variant="")
        if not run.config:
            raise ReportError(
                f"{path}: is not a run directory (no config.yaml of a run); correct the path"
            )
        runs.append(run)
    return runs


def _check_seeds(runs: Sequence[Run]) -> None:
    earlier: dict[tuple[str, int], Path] = {}
    for run in runs:
        other = earlier.setdefault((run.variant, run.seed), run.run_dir)
        if other != run.run_dir:
            raise ReportError(
                f"{run.run_dir}: same settings and seed {run.seed} as {other}, "
                "but for keys that change no result; name one of them"
            )


def _settings_of(config: Mapping[str, Any]) -> Settings:
    """The keys that make a run's variant."""
    return {
        key: value for key, value in flat(config).items() if not key.startswith(_WITHOUT_EFFECT)
    }


def _unfinished(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run that isn't over."""
    return [
        f"{run.run_dir} is not finished (step {run.last_step} of"
        f" {run.setting('training.steps', '?')}): its curve is shown, it is not compared."
        for run in runs
        if run.status == "partial"
    ]


def _incomparable(variants: Sequence[Settings]) -> list[str]:
    """A sentence, if the variants differ in what their accuracies are of."""
    differing = [key for key in _varying(variants) if key.startswith(_SAME_TASK)]
    if not differing:
        return []
    shown = "; ".join(
        f"{key} {', '.join(_distinct_values(variants, key))}" for key in differing[:3]
    )
    more = f" and {len(differing) - 3} more keys" if len(differing) > 3 else ""
    return [
        f"The variants differ in {shown}{more}: differences of their accuracies are not of the"
        " algorithm alone."
    ]


def _distinct_values(variants: Sequence[Settings], key: str) -> list[str]:
    return list(dict.fromkeys(str(settings.get(key)) for settings in variants))


def _varying(variants: Sequence[Settings]) -> list[str]:
    """Keys that aren't the same in all settings, in their order."""
    keys = list(dict.fromkeys(key for settings in variants for key in settings))
    first = variants[0]
    return [
        key for key in keys if any(settings.get(key) != first.get(key) for settings in variants)
    ]


def _names(variants: Sequence[Settings]) -> list[str]:
    """A name for each variant from algorithm, replay and old log-probs; where these are equal, with
    as many of the keys that differ as tell them apart, the most telling first. The report lists all
    keys."""
    short_names = [_short_name(settings) for settings in variants]
    names = []
    for name, settings in zip(short_names, variants, strict=True):
        alike = [
            other for other, its_name in zip(variants, short_names, strict=True) if its_name == name
        ]
        keys = [
            f"{key.rpartition('.')[2]}={_shown(alike, key, settings)}"
            for key in _telling_keys(alike)
        ]
        names.append(" ".join([name, *keys]))
    return names


def _short_name(settings: Settings) -> str:
    words = [str(settings.get("algorithm.name", "run"))]
    replay = settings.get("routing.replay", "none")
    if replay != "none":
        words.append(str(replay))
    if settings.get("algorithm.old_log_probs") == "rollout":
        words.append("rollout")
    return "_".join(words)


def _telling_keys(alike: Sequence[Settings]) -> list[str]:
    """As few of the keys that differ as tell all variants apart.

    A key that adds nothing is left out.
    """
    chosen: list[str] = []
    for key in sorted(_varying(alike), key=_rank):
        told_apart = _count_distinct(alike, chosen)
        if told_apart == len(alike):
            break
        if _count_distinct(alike, [*chosen, key]) > told_apart:
            chosen.append(key)
    return chosen


def _count_distinct(alike: Sequence[Settings], keys: Sequence[str]) -> int:
    return len({tuple(str(settings.get(key)) for key in keys) for settings in alike})


def _rank(key: str) -> int:
    return next(
        (rank for rank, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING)
    )


def _shown(alike: Sequence[Settings], key: str, settings: Settings) -> str:
    """A value in a name; of a path, as many of its last folders as tell it from the others."""
    value = settings.get(key)
    if not isinstance(value, str) or "/" not in value:
        return str(value)
    others = {str(other.get(key)) for other in alike} - {value}
    folders = value.rstrip("/").split("/")
    for count in range(1, len(folders)):
        tail = "/".join(folders[-count:])
        if not any(other.rstrip("/").endswith("/" + tail) or other == tail for other in others):
            return tail
    return value
