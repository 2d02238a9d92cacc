"""Finished run directories as a study, without a comparison file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.config.load import flat, read_file
from megatron_gspo.errors import InputError
from megatron_gspo.tools.compare.run_records import Run, read_run
from megatron_gspo.tools.compare.study import Study
from megatron_gspo.tools.compare.study_plan import Variant

# Starts of keys that change no result. Runs that differ in these alone are one variant.
_WITHOUT_EFFECT = (
    "run_dir",
    "seed",
    "tracking.",
    "checkpoint.",
    "data.cache_dir",
    "sglang.",
    "vllm.",
)


def study_of_runs(run_dirs: Sequence[Path], command: str, *, baseline: str | None) -> Study:
    """Runs that differ only in their seed, or in keys that change no result, are one variant. It
    has the name of its first directory.

    baseline: name of a variant; None is the first. Raises InputError for a directory without a
    run, a seed that a variant has twice, and an unknown baseline.
    """
    settings_of_variant: dict[str, Mapping[str, Any]] = {}
    runs: list[Run] = []
    for run_dir in {path.resolve(): path for path in run_dirs}.values():
        config = _config_of(run_dir)
        settings = {key: v for key, v in config.items() if not key.startswith(_WITHOUT_EFFECT)}
        names = [name for name, known in settings_of_variant.items() if known == settings]
        name = names[0] if names else _new_name(run_dir, settings_of_variant)
        settings_of_variant[name] = settings
        run = read_run(run_dir, variant=name, seed=int(config["seed"]))
        _check_records(run)
        _check_seed(run, runs)
        runs.append(run)
    if baseline is not None and baseline not in settings_of_variant:
        known_names = ", ".join(settings_of_variant)
        raise InputError(f"--baseline {baseline}: is not a variant; give one of {known_names}")
    return Study(
        title="Finished runs",
        variants=_variants(settings_of_variant),
        seeds=sorted({run.seed for run in runs}),
        baseline=baseline or next(iter(settings_of_variant)),
        runs=runs,
        command=command,
        base=str(run_dirs[0] / "config.yaml"),
        overrides={},
    )


def _config_of(run_dir: Path) -> dict[str, Any]:
    """Dotted keys and values."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise InputError(f"{run_dir}: is not a run directory (no config.yaml); correct the path")
    known = flat(read_file(file))
    if not isinstance(known.get("seed"), int) or "algorithm.name" not in known:
        raise InputError(f"{file}: is not the config of a run of this program; correct the path")
    return {key: v for key, v in known.items() if not key.startswith("environment.")}


def _new_name(run_dir: Path, taken: Mapping[str, Any]) -> str:
    """The path's last folders, as many as make a new name."""
    folders = run_dir.resolve().parts
    for count in range(1, len(folders)):
        name = "/".join(folders[-count:])
        if name not in taken:
            return name
    return str(run_dir.resolve())


def _check_records(run: Run) -> None:
    """Raises InputError for metrics that another program wrote."""
    for number, record in enumerate(run.records, 1):
        for key, value in record.items():
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number and (value is not None or key == "step"):
                raise InputError(
                    f"{run.run_dir / 'metrics.jsonl'}: record {number} has {key} = {value!r},"
                    " not a number; correct the path"
                )


def _check_seed(run: Run, earlier: Sequence[Run]) -> None:
    for other in earlier:
        if (other.variant, other.seed) == (run.variant, run.seed):
            raise InputError(
                f"{run.run_dir}: same settings and seed {run.seed} as {other.run_dir}, but for keys"
                " that change no result; name one of them"
            )


def _variants(settings_of_variant: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
    """With the keys in which they differ."""
    settings = list(settings_of_variant.values())
    keys = dict.fromkeys(key for each in settings for key in each)
    varying = [
        key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)
    ]
    return [
        Variant(name=name, overrides={key: each.get(key) for key in varying})
        for name, each in settings_of_variant.items()
    ]
