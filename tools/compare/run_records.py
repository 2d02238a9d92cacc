"""One run directory as data: its series, its status and the figures that the report compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gspo.tracking.run_directory import read_metrics

FAILURE = "failure.json"  # in the run directory of a run that failed: exit_code, message
COLLAPSE = 0.5  # a run whose last accuracy is below this part of its own best has collapsed


@dataclass(frozen=True)
class Run:
    """One run, read from its directory.

    status: finished, failed (it ended with an error), partial (killed, or still running) or
    missing. records: those of metrics.jsonl.
    """

    variant: str
    seed: int
    run_dir: Path
    status: str
    message: str = ""
    records: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def is_over(self) -> bool:
        """Finished or failed: its figures count."""
        return self.status in ("finished", "failed")

    @property
    def last_step(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0


def read_run(run_dir: Path, *, variant: str, seed: int) -> Run:
    """A run directory in any state."""
    metrics_file = run_dir / "metrics.jsonl"
    records = read_metrics(metrics_file) if metrics_file.is_file() else []
    failure = _json(run_dir / FAILURE)
    if _json(run_dir / "summary.json").get("exit") == "finished":
        status = "finished"
    elif failure:
        status = "failed"
    else:
        status = "partial" if (run_dir / "config.yaml").is_file() else "missing"
    return Run(
        variant=variant,
        seed=seed,
        run_dir=run_dir,
        status=status,
        message=str(failure.get("message", "")),
        records=records,
    )


def series(run: Run, metric: str) -> dict[float, float]:
    """The metric's values by step, where it has a finite one."""
    return {
        float(record["step"]): float(record[metric])
        for record in run.records
        if record.get(metric) is not None
    }


def mean_of(run: Run, metric: str) -> float | None:
    """Mean over the steps; None where the run has no such value."""
    values = series(run, metric).values()
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Figures:
    """One run in numbers, None where the run doesn't have them.

    final_accuracy: last held-out accuracy that was measured, also of a run that failed later.
    tokens: of prompts and responses. seconds: of the loop, without evaluations and checkpoints.
    """

    start_accuracy: float | None
    best_accuracy: float | None
    final_accuracy: float | None
    collapsed: bool
    steps: int
    tokens: float | None
    seconds: float | None


def figures(run: Run) -> Figures:
    accuracy = series(run, "eval/accuracy")
    best = max(accuracy.values(), default=None)
    final = list(accuracy.values())[-1] if accuracy else None
    last = float(run.last_step)
    return Figures(
        start_accuracy=accuracy.get(0.0),
        best_accuracy=best,
        final_accuracy=final,
        collapsed=best is not None and final is not None and final < COLLAPSE * best,
        steps=run.last_step,
        tokens=tokens_by_step(run).get(last),
        seconds=seconds_by_step(run).get(last),
    )


def tokens_by_step(run: Run) -> dict[float, float]:
    """Tokens of prompts and responses up to each step."""
    total = 0.0
    by_step = {}
    for record in run.records:
        total += record.get("perf/tokens") or 0.0
        by_step[float(record["step"])] = total
    return by_step


def seconds_by_step(run: Run) -> dict[float, float]:
    """Wall time of the loop up to each step, without evaluations and checkpoints."""
    total = 0.0
    by_step = {}
    for record in run.records:
        rest = (record.get("time/evaluate") or 0.0) + (record.get("time/checkpoint") or 0.0)
        total += max(0.0, (record.get("time/step") or 0.0) - rest)
        by_step[float(record["step"])] = total
    return by_step


def _json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none, or half of one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
