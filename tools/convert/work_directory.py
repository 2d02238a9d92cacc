"""Where a conversion works: a directory beside its output that knows what is done, and becomes the output at the end.

`OUT.partial/` holds `job.json` (what is converted: another conversion can't go on in it), `journal.jsonl` (one line a
finished unit) and `result/`, which is renamed to `OUT` when everything is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_gspo.errors import DiskError, InputError, existing_part, show_bytes, writing


class Workspace:
    """See the module; a context manager that holds the directory for this process alone.

    job: JSON-able; names sources and settings, so that the same command goes on where a killed one stopped. Raises
    ``InputError`` for an output that is there already, or a partial one of another job or of a running process.
    """

    def __init__(self, out: str | Path, job: dict[str, Any]) -> None:
        self.out = Path(os.path.abspath(out))  # "." has no name to put another beside
        self.folder = self.out.parent / (self.out.name + ".partial")
        self.result = self.folder / "result"
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        self.done: dict[int, Any] = {}

    def __enter__(self) -> Workspace:
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise InputError(f"{self.out} exists; remove it or choose another output")
        if not (above := existing_part(self.out)).is_dir():
            raise InputError(f"{self.out}: {above} is no directory; choose another output")
        with writing(self.folder):
            self.result.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"{self.folder} is in use by another conversion; wait for it or stop it") from None
        try:
            self._resume()
            self._journal = (self.folder / "journal.jsonl").open("a")
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        if error is not None and not self.done:  # it failed before anything was worth keeping
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _resume(self) -> None:
        file = self.folder / "job.json"
        if not file.exists():
            with writing(file):
                file.with_suffix(".new").write_text(json.dumps(self._job, indent=1))
                os.replace(file.with_suffix(".new"), file)
            return
        if json.loads(file.read_text()) != self._job:
            problem = "holds another conversion, or its source has changed"
            raise InputError(f"{self.folder} {problem}; remove it to start over")
        journal = self.folder / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        for line in lines:
            try:
                unit, result = json.loads(line)
            except ValueError:  # the line that a killed process was writing
                continue
            self.done[unit] = result
        if lines:
            journal.write_text("".join(json.dumps([unit, result]) + "\n" for unit, result in self.done.items()))

    def record(self, unit: int, result: Any) -> None:
        """Note a unit as done, with what is needed of it at the end. Its files must be on the disk already."""
        with writing(self.folder / "journal.jsonl"):
            self._journal.write(json.dumps([unit, result]) + "\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.done[unit] = result

    def check_room(self, needed: int) -> None:
        """Raise ``DiskError`` unless the disk takes `needed` more bytes."""
        free = shutil.disk_usage(existing_part(self.folder)).free
        if needed > free:
            room = f"{show_bytes(needed)} needed, {show_bytes(free)} free"
            raise DiskError(f"{self.out}: {room}; free some space or choose another disk")

    def publish(self) -> Path:
        """Rename the result to the output and remove the rest. Everything is flushed before."""
        with writing(self.out):
            for file in (*(f for f in self.result.rglob("*") if f.is_file()), self.result):
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            os.replace(self.result, self.out)
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.out


def file_stamps(folder: Path) -> dict[str, list[int]]:
    """Name -> [bytes, time of change] of a directory's files: what a job says of its source."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.is_file():
            status = file.stat()
            found[file.name] = [status.st_size, status.st_mtime_ns]
    return found
