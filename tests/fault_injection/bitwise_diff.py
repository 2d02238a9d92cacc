"""Whether two runs ended bitwise the same: exported weights, checkpoints with Adam's moments,
metrics and samples.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_gspo.tracking import read_metrics

_CLOCK = ("time/", "perf/")  # metrics that differ between any two runs
_OWN = ("wall_seconds", "exported")  # and entries of summary and state
_EXPORTS = ("hf", "critic_hf", "adapters")  # where a run has them
# Names of what is being written or removed.
_LEFT = ("*.tmp", "*.partial", "*.old", ".partial_*", ".removed_*")


def first_difference(run: Path, other: Path) -> str:
    """The first thing in which two finished run directories differ, with its file; "" where
    nothing does.
    """
    return next(_differences(run, other), "")


def _differences(run: Path, other: Path) -> Iterator[str]:
    yield from (
        f"{path.relative_to(run)} was left behind" for name in _LEFT for path in run.rglob(name)
    )
    for folder in (*_EXPORTS, "samples", "checkpoints"):
        names = _names(run / folder)
        wanted = _names(other / folder)
        if names != wanted:
            yield f"{folder}/ holds {', '.join(sorted(names ^ wanted))} in one run only"
    yield from _metrics(read_metrics(run), read_metrics(other))
    for file in sorted((other / "samples").iterdir()):
        if file.read_bytes() != (run / "samples" / file.name).read_bytes():
            yield f"samples/{file.name}"
    for file in sorted(
        file for folder in _EXPORTS for file in (other / folder).glob("*.safetensors")
    ):
        name = file.relative_to(other)
        yield from _tensors(str(name), load_file(run / name), load_file(file))
    for path in sorted((other / "checkpoints").iterdir()):
        checkpoint = run / "checkpoints" / path.name
        yield from _tensors(
            f"checkpoints/{path.name}", read_checkpoint(checkpoint), read_checkpoint(path)
        )
        for entry in ("state", "steps"):
            mine_of, other_of = (dict(_json(at / "state.json")[entry]) for at in (checkpoint, path))
            yield from _entries(f"checkpoints/{path.name}/state.json", mine_of, other_of)
    yield from _entries("summary.json", _json(run / "summary.json"), _json(other / "summary.json"))


def read_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Every entry of a distributed checkpoint by name, tensors whole; read without Megatron and
    in one process.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    entries: dict[str, Any] = dict.fromkeys(stored)
    for name, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata):
            entries[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        load(entries, checkpoint_id=checkpoint, no_dist=True)
    return entries


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _metrics(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> Iterator[str]:
    steps = [row["step"] for row in rows]
    wanted = [row["step"] for row in others]
    if steps != wanted:
        yield f"metrics.jsonl has the steps {steps}, not {wanted}"
    for row, other in zip(rows, others, strict=False):
        yield from _entries(f"metrics.jsonl, step {other['step']}", row, other)


def _entries(where: str, entries: dict[str, Any], others: dict[str, Any]) -> Iterator[str]:
    """Differences of two flat dicts, without clock times. json.dumps distinguishes all floats."""
    for name in sorted(set(entries) | set(others)):
        if not name.startswith(_CLOCK) and name not in _OWN:
            if json.dumps(entries.get(name)) != json.dumps(others.get(name)):
                yield f"{where}: {name} = {entries.get(name)}, not {others.get(name)}"


def _tensors(where: str, entries: dict[str, Any], others: dict[str, Any]) -> Iterator[str]:
    if entries.keys() != others.keys():
        yield f"{where}: {sorted(entries.keys() ^ others.keys())[0]} in one run only"
    for name in sorted(entries.keys() & others.keys()):
        if _bits(entries[name]) != _bits(others[name]):
            yield f"{where}: {name}"


def _bits(value: Any) -> tuple[str, bytes]:
    """Type and content: -0.0 and 0.0 differ, and a NaN equals itself."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return type(value).__name__, repr(value).encode()


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))
