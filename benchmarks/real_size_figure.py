"""One row of `real_size.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class NotMeasuredError(Exception):
    """The machine cannot measure this; the text says why."""


@dataclass(frozen=True)
class Figure:
    """One figure; lower is better. unit: of `ours` and `target`. parts: what it was computed from, by name and unit.
    before: the same of the code before the data plane, where this run measures it too."""

    what: str
    ours: float
    target: float
    unit: str
    parts: Mapping[str, float] = field(default_factory=dict)
    before: float | None = None

    @property
    def met(self) -> bool:
        return self.ours <= self.target

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def memory(field: str) -> int:
    """Bytes of this process by their name in /proc/self/status: VmRSS is held now, VmHWM was held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> int:
    """Forget the most that was held; returns what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # what is not on the disk yet would stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
