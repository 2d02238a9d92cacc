"""The work directory of a conversion: it records finished units and becomes the output at the end.

`OUT.partial/` holds `job.json` (sources and settings; only the same conversion can resume in it),
`journal.jsonl` (one line for each finished unit) and `result/`, which is renamed to `OUT` when it
is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_gspo.errors import DiskError, InputError, existing_part, show_bytes, writing
from megatron_gspo.mcore.checkpoint.checkpoint_files import ROLLOUTS

_NOT_OF_A_MODEL = re.compile(
    rf"{re.escape(ROLLOUTS)}(\.tmp)?|\.DS_Store|\..*\.sw[op]|.*~|.*\.(bak|tmp)"
)


class Workspace:
    """A context manager that locks the work directory for this process.

    job: JSON-able sources and settings; a work directory with the same job is resumed. Raises
    ``InputError`` if the output exists, or if its work directory belongs to another job or is in
    use.
    """

    def __init__(self, out: str | Path, job: dict[str, Any]) -> None:
        self.out = Path(os.path.abspath(out))  # "." has no name
        self.folder = self.out.parent / (self.out.name + ".partial")
        self.result = self.folder / "result"
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        self.done: dict[int, Any] = {}

    def __enter__(self) -> Workspace:
        check_output(self.out)
        with writing(self.folder):
            self.result.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(
                f"{self.folder} is in use by another conversion; wait for it or stop it"
            ) from None
        try:
            self._resume()
            self._journal = (self.folder / "journal.jsonl").open("a")
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.close()
        if error is not None and not self.done:  # nothing to resume
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
            except ValueError:  # incomplete line of a killed process
                continue
            self.done[unit] = result
        if lines:
            journal.write_text(
                "".join(json.dumps([unit, result]) + "\n" for unit, result in self.done.items())
            )

    def record(self, unit: int, result: Any) -> None:
        """Record a finished unit and its JSON-able result.

        Its files must be flushed to the disk before.
        """
        with writing(self.folder / "journal.jsonl"):
            self._journal.write(json.dumps([unit, result]) + "\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.done[unit] = result

    def check_room(self, needed: int) -> None:
        """Raise ``DiskError`` unless ``needed`` bytes are free."""
        free = shutil.disk_usage(existing_part(self.folder)).free
        if needed > free:
            room = f"{show_bytes(needed)} needed, {show_bytes(free)} free"
            raise DiskError(f"{self.out}: {room}; free some space or choose another disk")

    def publish(self) -> Path:
        """Flush the result, rename it to the output and remove the work directory.

        Returns the output.
        """
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


def check_output(out: str | Path) -> None:
    """Raise ``InputError`` unless a directory can be written to ``out``: nothing is there, or
    an empty directory.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists; remove it or choose another output")
    if not (above := existing_part(out)).is_dir():
        raise InputError(f"{out}: {above} is not a directory; choose another output")


def file_stamps(folder: Path) -> dict[str, list[int]]:
    """Name -> [bytes, modification time in ns] of a directory's files, to detect that a source has
    changed.

    Not of rollouts, which a run adds to a checkpoint later, nor of what editors and file managers
    leave.
    """
    stamps = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and not _NOT_OF_A_MODEL.fullmatch(file.name):
            status = file.stat()
            stamps[file.name] = [status.st_size, status.st_mtime_ns]
    return stamps
