"""One process writes a run directory: a lock that rank 0 holds while the run lasts."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.parallel.rank_zero import run_on_rank_zero

_PATIENCE = 20.0  # seconds that the processes of a killed run may take to end


@contextmanager
def sole_writer(run_dir: str | Path) -> Iterator[None]:
    """Hold the run directory's lock; ``CheckpointError`` on every rank if another process holds it.

    The system frees the lock when its holder ends, also by SIGKILL. Waits some seconds for the
    ranks of a killed run.
    """
    descriptor: list[int] = []
    run_on_rank_zero(
        lambda: descriptor.append(lock_directory(Path(run_dir))),
        error=CheckpointError,
        what="the run directory can't be locked",
    )
    try:
        yield
    finally:
        for number in descriptor:
            os.close(number)


def lock_directory(run_dir: Path, *, patience: float = _PATIENCE) -> int:
    """A descriptor with the record lock of ``run_dir/.lock``; ``CheckpointError`` after
    ``patience`` seconds.

    Unlike flock's it is not inherited by forked processes.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):  # either, by POSIX, if another process holds it
            if time.monotonic() > deadline:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                raise CheckpointError(
                    f"run_dir = {run_dir}: {holder or 'another process'} is still writing it; "
                    "end that run first or choose another run_dir"
                ) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            break
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor
