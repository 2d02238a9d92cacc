"""Files of results: one per benchmark and machine in ``results/``; ``latest.json`` names the newest of `run_all.py`.

Results are JSON with one row per line, so that a change of one row is a change of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine_kind

LATEST = "latest.json"  # {"result": name of a file in the same folder}
PARTIAL = "partial.json"
LINE = 1000  # characters; a value that fits is written on one line


def to_json(data: Any, indent: str = "") -> str:
    """JSON of `data`; what fits stays on one line, longer lists and mappings have one item per line."""
    line = json.dumps(data)
    if len(line) <= LINE and indent or not isinstance(data, (Mapping, list)) or not data:
        return line
    inner = indent + " "
    if isinstance(data, Mapping):
        items = [f"{inner}{json.dumps(key)}: {to_json(value, inner)}" for key, value in data.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + to_json(value, inner) for value in data) + f"\n{indent}]"


def save(file: Path, data: Any) -> None:
    """Write a result."""
    file.write_text(to_json(data) + "\n", encoding="utf-8")


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a result of ``run_all.py`` to ``<machine kind>.json`` and point ``latest.json`` to it; returns the file.

    A partial result goes to ``partial.json``, and ``latest.json`` stays: the rows it leads to come from one run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if result["partial"]:
        save(folder / PARTIAL, result)
        return folder / PARTIAL
    file = folder / f"{machine_kind(result['hardware'])}.json"
    save(file, result)
    save(folder / LATEST, {"result": file.name})
    return file


def latest_file(folder: Path = RESULTS) -> Path:
    """The result that ``latest.json`` names. Raises ``OSError``, ``KeyError`` or ``ValueError`` without one."""
    return folder / json.loads((folder / LATEST).read_text(encoding="utf-8"))["result"]


def read_latest(folder: Path = RESULTS) -> dict[str, Any]:
    """The content of `latest_file`; the same exceptions."""
    return json.loads(latest_file(folder).read_text(encoding="utf-8"))
