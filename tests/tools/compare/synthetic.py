"""A comparison file and its run directories, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.tools.compare.study import Study, read_study
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs
from megatron_gspo.tracking.run_directory import RunDirectory

EXAMPLES = Path(__file__).parents[3] / "examples" / "qwen3_moe"
COMMAND = "megatron-gspo compare compare.yaml"
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.name": "grpo"},
    "grpo_r2": {"algorithm.name": "grpo", "routing.replay": "r2"},
    "gspo": {"algorithm.name": "gspo", "algorithm.epsilon_low": 0.01},
}


def write_run(run_dir: Path, accuracies: Sequence[float], error: str = "") -> Path:
    """A run with these held-out accuracies at its steps, from 0 on; failed where there is an error.
    Returns its directory.
    """
    with RunDirectory(run_dir) as directory:
        directory.write_config({}, {})
        for step, accuracy in enumerate(accuracies):
            metrics = {"eval/accuracy": accuracy, "time/step": 2.0, "perf/tokens": 100.0}
            if step:
                metrics |= {"reward/mean": accuracy, "clip_fraction/tokens": 0.01}
            directory.log(step, metrics)
        if error:
            (run_dir / "failure.json").write_text(json.dumps({"message": error}))
        else:
            directory.write_summary({"exit": "finished"})
    return run_dir


def write_comparison(
    folder: Path, *, seeds: Sequence[int] = (1, 2, 3), names: Sequence[str] = tuple(VARIANTS)
) -> Path:
    """A comparison file of the named variants. Its runs are the caller's to write."""
    settings = {
        "title": "Made-up runs",
        "folder": str(folder / "out"),
        "base": str(EXAMPLES / "tiny_gspo.yaml"),
        "overrides": {
            "training.steps": 30,
            "rollout.rollout_batch_size": 16,
            "training.global_batch_size": 32,
        },
        "baseline": "grpo",
        "seeds": list(seeds),
        "variants": [{"name": name, "overrides": VARIANTS[name]} for name in names],
    }
    file = folder / "compare.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def study_of(folder: Path, ends: Mapping[str, Sequence[float]]) -> Study:
    """The runs of variants whose accuracies go from 0.2 to these ends, one a seed."""
    seeds = range(1, 1 + max(len(each) for each in ends.values()))
    comparison = load_comparison(write_comparison(folder, seeds=seeds, names=tuple(ends)))
    for spec in planned_runs(comparison):
        if spec.seed <= len(ends[spec.variant]):
            write_run(spec.run_dir, [0.2, ends[spec.variant][spec.seed - 1]])
    return read_study(comparison, COMMAND)
