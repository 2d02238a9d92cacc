"""The directory of a run: metrics.jsonl, routing.jsonl, timeline.jsonl, config.yaml, samples/,
ratios/, checkpoints/, summary.json.

Only rank 0 opens it. Tools that compare or plot runs read only these files. Other files in it are
the user's (``given_names.py``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import numpy as np
import yaml

from megatron_gspo.given_names import RATIOS, SAMPLES, files_named

T = TypeVar("T")

# What belongs to one run, and is kept together when another one begins. Checkpoints are not among
# it: where there is a complete one, the run continues.
FILES_OF_A_RUN = (
    "config.yaml",
    "metrics.jsonl",
    "routing.jsonl",
    "rollouts.jsonl",
    "timeline.jsonl",
    "samples",
    "ratios",
    "summary.json",
    "curves.png",
    "timeline.svg",
    "profile",
    "hf",
    "adapters",
    "critic_hf",
    "evaluation",
    "tensorboard",
    "wandb_id",
    "mlflow_id",
    "trackio_id",
    "swanlab",
    "swanlab_id",
)
_TEMPORARY = r"(metrics|routing|rollouts|timeline)\.jsonl\.tmp|config\.yaml\.tmp|summary\.json\.tmp"
_TEMPORARY_STEP = r"step_[0-9]{6,}\.(jsonl|npz)\.tmp"
_EARLIER = "earlier_"


class RunDirectory:
    """Writes one run's files.

    Args: path: created with its parents. resume_step: last step that the loaded checkpoint
        contains; None for a new run. Records and samples of later steps are removed, so that a
        repeated step is not counted twice. None moves all that an earlier run has left to
        ``earlier_1/``, ``earlier_2/`` and so on. reuse: whether there may be an earlier run; False
        raises FileExistsError if there is one.

    Attributes: earlier: where the files of an earlier run are now; None if there were none, or if
        it continues.
    """

    def __init__(
        self, path: str | Path, *, resume_step: int | None = None, reuse: bool = True
    ) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.ratios = self.path / "ratios"
        self.metrics = self.path / "metrics.jsonl"
        self.routing = self.path / "routing.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.summary = self.path / "summary.json"
        if not reuse and self.metrics.exists():
            raise FileExistsError(
                f"run_dir = {self.path}: holds another run; "
                "choose another run_dir or set checkpoint.resume: auto"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.earlier = self._set_aside() if resume_step is None else None
        self.samples.mkdir(exist_ok=True)
        self._last_step = -1 if resume_step is None else resume_step
        self._remove_after(self._last_step)
        self._file = self.metrics.open("a", encoding="utf-8")

    def _set_aside(self) -> Path | None:
        """Move the files of an earlier run to a folder of their own: its path, or None where there
        is nothing to keep, which is all that a start without a step leaves."""
        files = [self.path / name for name in FILES_OF_A_RUN if os.path.lexists(self.path / name)]
        if not any(_holds_something(file) for file in files if file.name != "config.yaml"):
            return None
        numbers = [re.fullmatch(_EARLIER + "([0-9]+)", name) for name in os.listdir(self.path)]
        last = max((int(number[1]) for number in numbers if number), default=0)
        earlier = self.path / f"{_EARLIER}{last + 1}"
        earlier.mkdir()
        for file in files:
            if file.is_symlink():  # its target may be relative
                (earlier / file.name).symlink_to(os.path.realpath(file))
                file.unlink()
            else:
                os.rename(file, earlier / file.name)
        return earlier

    def _remove_after(self, step: int) -> None:
        for records in (self.metrics, self.routing, self.rollouts, self.timeline):
            if records.exists():
                kept = [record for record in read_metrics(records) if record["step"] <= step]
                write_atomically(records, "".join(json.dumps(record) + "\n" for record in kept))
        for names, folder in ((SAMPLES, self.samples), (RATIOS, self.ratios)):
            for number, file in names.entries(folder).items():
                if number > step:
                    file.unlink()
            for file in files_named(folder, _TEMPORARY_STEP):
                file.unlink()
        for file in files_named(self.path, _TEMPORARY):
            file.unlink()
        self.summary.unlink(missing_ok=True)  # written when the run ends

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
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

    def write_samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """samples/step_000012.jsonl, one JSON object a line."""
        file = self.samples / SAMPLES.file_name(step)
        lines = [json.dumps(dict(record), ensure_ascii=False) for record in records]
        write_atomically(file, "".join(line + "\n" for line in lines))
        return file

    def write_routing(self, step: int, record: Mapping[str, Any]) -> None:
        """One line of routing.jsonl: the step's figures by MoE layer and expert (lists of
        numbers).
        """
        with self.routing.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite({"step": step, **record}), allow_nan=False) + "\n")

    def write_rollouts(self, step: int, record: Mapping[str, Any]) -> None:
        """One line of rollouts.jsonl: the samples that the step trained on, and their weight
        versions.
        """
        with self.rollouts.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")

    def write_timeline(self, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """One line of timeline.jsonl: phase, begin and end of each span, in seconds since the
        step's begin.
        """
        rounded = [[phase, round(begin, 4), round(end, 4)] for phase, begin, end in spans]
        with self.timeline.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "spans": rounded}) + "\n")

    def write_ratios(self, step: int, arrays: Mapping[str, np.ndarray]) -> Path:
        """ratios/step_000012.npz, written atomically; ``numpy.load`` reads it without
        unpickling.
        """
        self.ratios.mkdir(exist_ok=True)
        file = self.ratios / RATIOS.file_name(step)
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

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl (or of the run directory that holds it), in order.

    Reading stops at the first invalid line: a killed process may leave an incomplete one at the
    end.
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


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """At most count items, evenly spaced over the sequence; the first and the last are included
    if count > 1.
    """
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


def _holds_something(path: Path) -> bool:
    """Whether a folder has entries, or a file bytes; a broken link counts."""
    if path.is_dir():
        return any(path.iterdir())
    return not path.exists() or path.stat().st_size > 0


def _number(value: SupportsFloat) -> float | int | None:
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
