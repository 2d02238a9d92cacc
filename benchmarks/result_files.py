"""Results are JSON with one row per line, so that a change of one row is a change of one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINE = 1000  # characters; a value that fits is written on one line


def to_json(data: Any, indent: str = "") -> str:
    """JSON of `data`; what fits stays on one line, longer lists and mappings have one item per
    line.
    """
    line = json.dumps(data)
    if len(line) <= LINE and indent or not isinstance(data, (Mapping, list)) or not data:
        return line
    inner = indent + " "
    if isinstance(data, Mapping):
        items = [
            f"{inner}{json.dumps(key)}: {to_json(value, inner)}" for key, value in data.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + to_json(value, inner) for value in data) + f"\n{indent}]"


def save(file: Path, data: Any) -> None:
    """Write a result."""
    file.write_text(to_json(data) + "\n", encoding="utf-8")
