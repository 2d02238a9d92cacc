"""One process writes a run directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_gspo.loop.run_lock import lock_directory, sole_writer
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from tests.support.distributed import fork_server, run_distributed


def hold(run_dir: Path, ready) -> None:
    lock_directory(run_dir)
    ready.set()
    signal.pause()


def test_a_run_directory_has_one_writer(tmp_path):
    context = fork_server()
    ready = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(
        CheckpointError, match=f"process {holder.pid} on .* is still writing it; end that run first"
    ):
        lock_directory(tmp_path, patience=0.2)
    holder.kill()
    holder.join()
    os.close(lock_directory(tmp_path, patience=0.2))


def lock_twice(rank: int, world: int, folder: str) -> list[str]:
    seen = []
    with sole_writer(folder):
        seen.append(sorted(path.name for path in Path(folder).iterdir())[0])
    with sole_writer(folder):
        seen.append((Path(folder) / ".lock").read_text())
    return seen


def test_rank_0_holds_the_lock_for_all(tmp_path):
    first, second = run_distributed(lock_twice, 2, str(tmp_path))
    assert first == second and first[0] == ".lock" and first[1].startswith("process ")
