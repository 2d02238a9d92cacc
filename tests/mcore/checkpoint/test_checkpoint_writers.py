"""Writers that fail end the save on every rank."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError, complete_checkpoints
from megatron_gspo.mcore.checkpoint.save_load import begin_save, save_checkpoint
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.saved_policies import hold_writers, policy_in


def fail_while_saving(rank: int, world_size: int, path: str, folder: str) -> list[str]:
    """A writer is killed on one rank, while the other's are held up."""
    target, errors = Path(folder), []
    policy = policy_in(path, parallel(tensor=2))
    save_checkpoint(policy, target, 2, {}, keep=1)
    hold_writers()
    killed = begin_save(policy, target, 3, {}, keep=1)
    pids = killed.writers
    if rank == 1:
        os.kill(pids[0], signal.SIGKILL)
        killed._writers.poll(timeout=None)  # its end has come through
    with pytest.raises(CheckpointError) as caught:
        killed.poll()
    errors.append(str(caught.value))
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return [*errors, str(left), str([file.name for file in complete_checkpoints(target)])]


def test_a_writer_that_is_killed_ends_the_save_on_every_rank(path, tmp_path):
    for line, left, complete in run_distributed(fail_while_saving, 2, path, str(tmp_path), timeout=120):
        assert line.startswith("checkpoint not written; the last one is untouched: a writer was ended by signal 9 (")
        assert " free, the last one takes " in line and "\n" not in line
        assert left == "[]" and complete == "['step_000002']"


def fail_on_rank_0(rank: int, world_size: int, path: str, folder: str) -> list[str]:
    """What rank 0 alone writes: the first file before 0.19, and the metadata. A failure must end all ranks."""
    target, errors = Path(folder), []
    policy = policy_in(path, parallel(tensor=2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(policy, target, 1, {}, keep=1)
    errors.append(str(caught.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save = begin_save(policy, target, 2, {}, keep=1)
    for name in (".metadata", ".metadata.tmp"):
        (save.path / name).mkdir(exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        save.finish()
    errors.append(str(caught.value))
    at = save_checkpoint(policy, target, 3, {}, keep=1)
    return [*errors, at.name]


def test_a_file_of_rank_0_alone_ends_the_save_on_every_rank(path, tmp_path):
    for first, last, name in run_distributed(fail_on_rank_0, 2, path, str(tmp_path), timeout=120):
        assert first.startswith("checkpoint not written; the last one is untouched: ") and " free)" in first
        assert "Is a directory" in last and "\n" not in first + last
        assert name == "step_000003"
