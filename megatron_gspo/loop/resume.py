"""What a run needs to go on where it was: its state, its checkpoints, and that no other process writes them."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.rollout_buffer import Place
from megatron_gspo.loop.servers import is_central, sync_weights
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    CheckpointError,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    remove_old,
)
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint
from megatron_gspo.parallel.rank_zero import run_on_rank_zero

_PATIENCE = 20.0  # seconds that the processes of a killed run may take to end


@dataclass
class LoopState:
    """All that a resumed run needs besides weights and optimizer; saved with every checkpoint."""

    step: int = 0  # rollout batches done
    cursor: int = 0  # prompts drawn
    pending: tuple[int, ...] = ()  # indices of those drawn that are not trained on yet
    samples: int = 0
    tokens: int = 0
    wall_seconds: float = 0.0
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    @property
    def place(self) -> Place:
        return Place(self.cursor, tuple(self.pending))

    @place.setter
    def place(self, place: Place) -> None:
        self.cursor, self.pending = place.cursor, place.pending


def resume(run: Run) -> tuple[LoopState, Path | None]:
    """Load the newest whole checkpoint, if ``checkpoint.resume`` allows and there is one, and tell the engine.

    The writing rank chooses for all; it says which it takes and what is wrong with those that it passes over.
    """
    found = run_on_rank_zero(
        lambda: _choose(run), error=CheckpointError, what="the run's checkpoints can't be read"
    )
    if found is None:
        if run.generates_on_policy and (run.config.model.init == "random" or is_central(run.engine)):
            sync_weights(run, 0)
        return LoopState(), None
    state = LoopState(**load_checkpoint(run.policy, found))
    if run.generates_on_policy:
        sync_weights(run, state.step)
    if run.is_writer:
        print(f"resumed from {found}: step {state.step}", file=sys.stderr)
    return state, found


@contextmanager
def sole_writer(run: Run) -> Iterator[None]:
    """Hold the run directory's lock; ``CheckpointError`` on every rank where another process keeps it.

    The system frees the lock when its holder dies, however it dies. Ranks of a killed run that outlive it a little
    are waited for.
    """
    run_dir = Path(run.config.run_dir)
    descriptor: list[int] = []
    run_on_rank_zero(
        lambda: descriptor.append(lock_directory(run_dir)),
        error=CheckpointError, what="the run directory can't be locked",
    )  # fmt: skip
    try:
        yield
    finally:
        for number in descriptor:
            os.close(number)


def lock_directory(run_dir: Path, *, patience: float = _PATIENCE) -> int:
    """A descriptor with the record lock of ``run_dir/.lock``; ``CheckpointError`` after ``patience`` seconds.

    Unlike flock's it isn't inherited by the forked writers of a checkpoint.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):  # what POSIX allows for a lock that another one has
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


def checkpoint_folder(run: Run) -> Path:
    """Where a run's checkpoints lie."""
    return Path(run.config.run_dir) / "checkpoints"


def _choose(run: Run) -> Path | None:
    """The checkpoint to go on from. Ends what a killed run left half done: a save, or the removal of old ones."""
    if run.config.checkpoint.resume != "auto":
        return None
    remove_leftovers(checkpoint_folder(run))
    found, faults = newest_checkpoint(checkpoint_folder(run))
    for fault in faults:
        what = f"resuming from {found.name}" if found else "starting from the beginning"
        print(f"{fault}: {what}", file=sys.stderr)
    if found is not None:
        _check_state(found, read_state(found))
        remove_old(checkpoint_folder(run), keep=run.config.checkpoint.keep)
    return found


def _check_state(path: Path, state: dict[str, Any]) -> None:
    known = {field.name for field in fields(LoopState)}
    wrong = sorted(known ^ set(state))
    if wrong:
        what = "lacks" if wrong[0] in known else "has the unknown key"
        raise CheckpointError(
            f"{path}/state.json {what} {wrong[0]}: it is of another version of this program; "
            "train on with that version or start anew in another run_dir"
        )
