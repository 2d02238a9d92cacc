"""Rows of prompt files: JSON lines, Parquet, and data sets saved by the Hugging Face `datasets` library."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_gspo.errors import InputError, first_line

Row = dict[str, Any]
Location = str  # of a row, for error messages: "data.jsonl line 3"

_JSON_LINES = (".jsonl", ".ndjson")
_SUPPORTED = ".jsonl, .parquet, .arrow or a directory written by datasets' save_to_disk"


class PromptError(InputError):
    """Prompts that can't be used; one line naming the file, the row, the key and the fix."""


def read_rows(path: str | Path, *, split: str = "train") -> Iterator[tuple[Location, Row]]:
    """All rows of a prompt file, each with its location, one after another.

    path: .jsonl / .ndjson (blank lines are skipped), .parquet (needs pyarrow), .arrow or a directory saved by
        `datasets` (needs datasets).
    split: which split of a saved DatasetDict.
    Raises PromptError for a missing, unreadable or unknown file; for an invalid line when it is reached.
    """
    path = Path(path)
    if not path.exists():
        raise PromptError(f"{path}: no such file; check the path (relative to {Path.cwd()})")
    if path.is_dir() or path.suffix == ".arrow":
        return _read_datasets(path, split)
    if path.suffix in _JSON_LINES:
        return _read_json_lines(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise PromptError(f"{path}: unknown kind {path.suffix or '(no suffix)'!r}; use {_SUPPORTED}")


def optional_module(name: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise ImportError with one line that names what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {package}: pip install 'megatron-gspo[{extra}]' ({error})"
        ) from error


def _read_json_lines(path: Path) -> Iterator[tuple[Location, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            location = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON or not UTF-8
                reason = str(error).split("\n")[0]
                raise PromptError(f"{location}: not JSON ({reason}); write one JSON object a line") from error
            if not isinstance(row, dict):
                raise PromptError(f"{location}: a JSON {type(row).__name__}; write one JSON object a line")
            yield location, row


def _read_parquet(path: Path) -> Iterator[tuple[Location, Row]]:
    parquet = optional_module("pyarrow.parquet", "pyarrow", "data", f"reading {path}")
    try:
        table = parquet.read_table(path)
    except (ValueError, OSError) as error:  # pyarrow's errors derive from these two
        raise PromptError(f"{path}: not Parquet ({first_line(error)}); write the file again") from error
    return _numbered(path, (row for batch in table.to_batches() for row in batch.to_pylist()))


def _read_datasets(path: Path, split: str) -> Iterator[tuple[Location, Row]]:
    datasets = optional_module("datasets", "datasets", "data", f"reading {path}")
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.Dataset.from_file(str(path))
    except (ValueError, OSError) as error:
        reason = first_line(error)
        raise PromptError(f"{path}: not a saved dataset ({reason}); write it with save_to_disk") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise PromptError(f"{path}: has no split {split!r}; it has {', '.join(sorted(loaded))}")
        loaded = loaded[split]
    return _numbered(path, loaded)


def _numbered(path: Path, rows: Iterable[Row]) -> Iterator[tuple[Location, Row]]:
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))
