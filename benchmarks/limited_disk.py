"""A disk with a rate limit, for figures that do not depend on how fast this machine's disk is beside its cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.real_size_figure import NotMeasuredError

_GROUPS = Path("/sys/fs/cgroup/blkio")


@contextmanager
def limited_disk(folder: Path, rate: int) -> Iterator[Path]:
    """A control group (version 1) whose processes together read and write the disk of ``folder`` at ``rate`` bytes per
    second, each way. A process joins by `join`; all must have ended at the exit.

    Raises ``NotMeasuredError`` where this process may not make one.
    """
    device = os.stat(folder).st_dev
    group = _GROUPS / f"limited_disk_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NotMeasuredError(f"no control group that limits a disk: {error}") from None
    try:
        _set_limits(group, f"{os.major(device)}:{os.minor(device)} {rate}")
        yield group
    finally:
        group.rmdir()


def _set_limits(group: Path, limit: str) -> None:
    """limit: device and rate, as the kernel reads them."""
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
    except OSError as error:
        raise NotMeasuredError(f"{group} takes no limit of {limit}: {error}") from None


def join(group: Path) -> None:
    """Put this process and its threads under the limits of ``group``."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
