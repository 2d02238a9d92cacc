"""One run directory as data: its series, its status and the figures that the report compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.errors import InputError
from megatron_gspo.tracking.run_directory import read_metrics

FAILURE = "failure.json"  # in the run directory of a run that failed: exit_code, message
COLLAPSE = 0.5  # a run whose last accuracy is below this part of its own best has collapsed
TAIL = 0.1  # the last part of a run's steps that "at the end" means for training rewards
_SECTIONS = ("model", "algorithm", "rollout", "training", "optimizer", "routing", "data")
AXES = ("samples", "tokens", "seconds")


class ReportError(InputError):
    """Run directories that can't be compared."""

    label = "report error"


@dataclass(frozen=True)
class Run:
    """One run, read from its directory.

    status: finished, failed (it ended with an error), partial (killed, or still running) or
    missing. config: resolved training config as plain data; environment: where and with what it
    ran. records: those of metrics.jsonl.
    """

    variant: str
    seed: int
    run_dir: Path
    status: str
    message: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
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

    def setting(self, key: str, default: Any = None) -> Any:
        """A dotted key of the config."""
        section, _, name = key.partition(".")
        return (self.config.get(section) or {}).get(name, default)


def read_run(run_dir: str | Path, *, variant: str, seed: int | None = None) -> Run:
    """A run directory in any state. seed None takes the config's. Raises ReportError for a config
    that can't be read, and for files that are not a run's."""
    path = Path(run_dir)
    config, environment = _config(path)
    records = _records(path / "metrics.jsonl")
    failure = _json(path / FAILURE)
    if _json(path / "summary.json").get("exit") == "finished":
        status = "finished"
    elif failure:
        status = "failed"
    else:
        status = "partial" if records or config else "missing"
    return Run(
        variant=variant,
        seed=seed if seed is not None else int(config.get("seed", 0)),
        run_dir=path,
        status=status,
        message=str(failure.get("message", "")),
        config=config,
        environment=environment,
        records=records,
    )


def series(run: Run, metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of the records that hold a finite value of the metric."""
    points = [(r["step"], r[metric]) for r in run.records if r.get(metric) is not None]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def against(run: Run, metric: str, axis: str) -> tuple[list[float], list[float]]:
    """The metric against `samples`, `tokens` (prompts and responses) or `seconds`, each cumulative.

    seconds: wall time of the loop without evaluations and checkpoints.
    """
    by_step = positions(run, axis)
    steps, values = series(run, metric)
    return [by_step[step] for step in steps], values


def mean_of(run: Run, metric: str, *, tail: float = 1.0, first: int = 1) -> float | None:
    """Mean over the steps from `first` on, or over their last part; None where the run has no
    such value.
    """
    values = [value for step, value in zip(*series(run, metric), strict=True) if step >= first]
    count = max(1, round(tail * len(values)))
    return sum(values[-count:]) / count if values else None


def seconds_per_step(run: Run) -> float | None:
    """Mean over all steps but the first, which has one-time costs; without evaluations and
    checkpoints.
    """
    seconds = positions(run, "seconds")
    steps = [step for step in seconds if step >= 1]
    if len(steps) < 2:
        return None
    return (seconds[steps[-1]] - seconds[steps[0]]) / (steps[-1] - steps[0])


@dataclass(frozen=True)
class Figures:
    """One run in numbers, None where the run doesn't have them.

    final_accuracy: last held-out accuracy that was measured, also of a run that failed later.
    mean_accuracy: area under the accuracy against steps over the span, by trapezia: how soon and
    how steadily. reward: mean training reward over the last tenth of the steps.
    """

    start_accuracy: float | None
    best_accuracy: float | None
    final_accuracy: float | None
    mean_accuracy: float | None
    reward: float | None
    steps: int
    samples: float | None
    tokens: float | None
    seconds: float | None
    collapsed: bool


def figures(run: Run) -> Figures:
    steps, accuracy = series(run, "eval/accuracy")
    best = max(accuracy, default=None)
    last = run.last_step
    ends = {axis: positions(run, axis).get(float(last)) if last else None for axis in AXES}
    return Figures(
        start_accuracy=accuracy[0] if accuracy and steps[0] == 0 else None,
        best_accuracy=best,
        final_accuracy=accuracy[-1] if accuracy else None,
        mean_accuracy=area(steps, accuracy),
        reward=mean_of(run, "reward/mean", tail=TAIL),
        steps=last,
        collapsed=best is not None and accuracy[-1] < COLLAPSE * best,
        **ends,
    )


def area(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Mean height of a piecewise linear curve; its only value where there is one, None where
    there is none.
    """
    if len(x) < 2:
        return y[0] if y else None
    total = sum((x[i + 1] - x[i]) * (y[i] + y[i + 1]) / 2 for i in range(len(x) - 1))
    return total / (x[-1] - x[0])


def positions(run: Run, axis: str) -> dict[float, float]:
    """Where each recorded step lies on `samples`, `tokens` or `seconds`.

    Raises ValueError for another axis.
    """
    prompts = run.setting("rollout.rollout_batch_size", 1)
    sequences = prompts * run.setting("rollout.n_samples_per_prompt", 1)
    by_step: dict[float, float] = {}
    total = 0.0
    for record in run.records:
        if axis == "samples":
            total = float(record["step"] * sequences)
        elif axis == "tokens":
            total += record.get("perf/tokens") or 0.0
        elif axis == "seconds":
            rest = (record.get("time/evaluate") or 0.0) + (record.get("time/checkpoint") or 0.0)
            total += max(0.0, (record.get("time/step") or 0.0) - rest)
        else:
            raise ValueError(f"axis = {axis!r}: is none of {', '.join(AXES)}; choose one")
        by_step[float(record["step"])] = total
    return by_step


def _config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    file = path / "config.yaml"
    if not file.is_file():
        return {}, {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ReportError(
            f"{file}: cannot be read ({reason}); remove the directory or run it again"
        ) from None
    if not isinstance(content, dict):
        raise ReportError(f"{file}: is not a mapping of keys; remove the directory or run it again")
    environment = content.pop("environment", None) or {}
    _check_sections(file, content)
    if not isinstance(environment, dict):
        environment = {}
    return content, environment


def _check_sections(file: Path, content: Mapping[str, Any]) -> None:
    """Raise ReportError for a config of another program."""
    present = [name for name in _SECTIONS if name in content]
    wrong = [name for name in present if not isinstance(content[name], Mapping)]
    if wrong or not present:
        reason = (
            f"{wrong[0]} is not a section there"
            if wrong
            else f"it has none of {', '.join(_SECTIONS)}"
        )
        raise ReportError(
            f"{file}: is not a config of a run of this program ({reason}); correct the path"
        )


def _records(file: Path) -> list[dict[str, Any]]:
    """The records of a run, none without the file.

    Raises ReportError for those of another program.
    """
    if not file.is_file():
        return []
    records = read_metrics(file)
    for number, record in enumerate(records, start=1):
        for name, value in record.items():
            is_step = name == "step" and isinstance(value, int)
            if not is_step and (name == "step" or not isinstance(value, (int, float, type(None)))):
                problem = f"record {number} has {name} = {str(value)[:40]!r}"
                raise ReportError(
                    f"{file}: is not of a run of this program ({problem}); correct the path"
                )
    return records


def _json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none, or half of one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
