"""The directory of a run: metrics.jsonl, routing.jsonl, config.yaml, samples/, ratios/, checkpoints/, summary.json.

Only rank 0 opens it. Tools that compare or plot runs read only these files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml


class RunDirectory:
    """Writes one run's files.

    Args:
        path: created with its parents.
        resume_step: last step that the loaded checkpoint contains; None for a new run.
            Records and samples of later steps are removed, so that a repeated step is not counted
            twice. None removes all of them.
        reuse: whether earlier records may be removed; False raises FileExistsError if there are any.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None, reuse: bool = True) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.ratios = self.path / "ratios"
        self.metrics = self.path / "metrics.jsonl"
        self.routing = self.path / "routing.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.summary = self.path / "summary.json"
        self.picture = self.path / "curves.png"
        if not reuse and self.metrics.exists():
            raise FileExistsError(
                f"run_dir = {self.path}: holds another run; "
                "choose another run_dir or set checkpoint.resume: auto"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.samples.mkdir(exist_ok=True)
        self._last_step = -1 if resume_step is None else resume_step
        self._remove_after(self._last_step)
        self._file = self.metrics.open("a", encoding="utf-8")

    def _remove_after(self, step: int) -> None:
        for records in (self.metrics, self.routing, self.rollouts):
            if records.exists():
                kept = [record for record in read_metrics(records) if record["step"] <= step]
                write_atomically(records, "".join(json.dumps(record) + "\n" for record in kept))
        for file in (*self.samples.glob("step_*.jsonl"), *self.ratios.glob("step_*.npz")):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()
        for file in (*self.path.glob("*.tmp"), *self.samples.glob("*.tmp"), *self.ratios.glob("*.tmp")):
            file.unlink()
        self.summary.unlink(missing_ok=True)  # written when the run ends

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Append one step's record and sync it to disk, so that no checkpoint is ahead of it.

        Values are numbers or one-element tensors; non-finite ones become null. Returns the record
        without its step. Raises ValueError if the step was logged before.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step = {step}: is not after step {self._last_step}; log each step once, in order"
            )
        values = {name: _number(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step = step
        return values

    def write_config(self, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """config.yaml: the resolved config and the environment of the run. load_config reads it."""
        content = {**config, "environment": dict(environment)}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text)

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """samples/step_000012.jsonl, one JSON object a row."""
        file = self.samples / f"step_{step:06d}.jsonl"
        write_atomically(file, "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows))
        return file

    def write_routing(self, step: int, record: Mapping[str, Any]) -> None:
        """One line of routing.jsonl: the step's figures by MoE layer and expert (lists of numbers)."""
        with self.routing.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite({"step": step, **record}), allow_nan=False) + "\n")

    def write_rollouts(self, step: int, record: Mapping[str, Any]) -> None:
        """One line of rollouts.jsonl: the samples that the step trained on, and their weight versions."""
        with self.rollouts.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")

    def write_ratios(self, step: int, arrays: Mapping[str, np.ndarray]) -> Path:
        """ratios/step_000012.npz, written atomically; ``numpy.load`` reads it without unpickling."""
        self.ratios.mkdir(exist_ok=True)
        file = self.ratios / f"step_{step:06d}.npz"
        temporary = file.with_name(file.name + ".tmp")
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        temporary.replace(file)
        return file

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json, written atomically."""
        write_atomically(self.summary, json.dumps(_finite(dict(summary)), indent=2) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: `log` has raised already
            self._file.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl (or of the run directory that holds it), in order.

    Reading stops at the first invalid line: a killed process may leave an incomplete one at the end.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or "step" not in record:
            break
        records.append(record)
    return records


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most count items, evenly spaced over the sequence; the first and the last are included if count > 1."""
    if count >= len(items):
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, (int, float)) else float(value)
    return number if math.isfinite(number) else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return str(value) if isinstance(value, Path) else _number(value)
