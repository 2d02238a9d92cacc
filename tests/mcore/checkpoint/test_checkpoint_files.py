"""Which directories are complete checkpoints, beside those that a killed run or a broken disk left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    STATE,
    begin_checkpoint,
    checkpoint_path,
    complete_checkpoints,
    fault_of,
    newest_checkpoint,
    publish_checkpoint,
    read_state,
    remove_leftovers,
    remove_old,
)


def write(folder: Path, step: int, *, keep: int = 9) -> Path:
    partial = begin_checkpoint(folder, step)
    (partial / "sub").mkdir()
    (partial / "x.distcp").write_bytes(b"0123456789" * 2)
    (partial / "sub" / "y").write_bytes(b"abc")
    publish_checkpoint(partial, checkpoint_path(folder, step), {"step": step, "cursor": 8 * step}, keep=keep)
    return checkpoint_path(folder, step)


def test_a_published_checkpoint_is_whole_and_alone(tmp_path):
    path = write(tmp_path, 3)
    assert fault_of(path) == "" and read_state(path) == {"step": 3, "cursor": 24}
    assert json.loads((path / STATE).read_text())["files"] == {"x.distcp": 20, "sub/y": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["step_000003"]
    write(tmp_path, 10, keep=2)
    write(tmp_path, 4, keep=2)
    assert [file.name for file in complete_checkpoints(tmp_path)] == ["step_000004", "step_000010"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_000004", "step_000010"]


def test_writing_a_step_again_replaces_it(tmp_path):
    (write(tmp_path, 3) / "x.distcp").write_bytes(b"")
    write(tmp_path, 3)
    assert fault_of(tmp_path / "step_000003") == ""
    assert [file.name for file in tmp_path.iterdir()] == ["step_000003"]


DAMAGES = {
    "no state.json": lambda path: (path / STATE).unlink(),
    "state.json is not JSON": lambda path: (path / STATE).write_text('{"state": {"step": 3'),
    "state.json has no list of files": lambda path: (path / STATE).write_text('{"step": 3}'),
    "x.distcp: 10 of 20 bytes": lambda path: (path / "x.distcp").write_bytes(b"0123456789"),
    "sub/y is missing": lambda path: (path / "sub" / "y").unlink(),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, fault):
    older = write(tmp_path, 2)
    path = write(tmp_path, 4)
    DAMAGES[fault](path)
    assert fault_of(path) == fault
    assert newest_checkpoint(tmp_path) == (older, [f"{path} is incomplete ({fault})"])
    assert complete_checkpoints(tmp_path) == [older]


def test_an_old_damaged_one_is_of_no_interest(tmp_path):
    (write(tmp_path, 2) / STATE).unlink()
    newest = write(tmp_path, 4)
    assert newest_checkpoint(tmp_path) == (newest, [])
    assert newest_checkpoint(tmp_path / "nothing") == (None, [])


def test_a_killed_save_leaves_nothing_that_counts(tmp_path):
    """Two writers of the same step never share a directory; what they leave goes with the next save."""
    path = write(tmp_path, 2)
    first = begin_checkpoint(tmp_path, 4)
    (first / "x.distcp").write_bytes(b"0")
    second = begin_checkpoint(tmp_path, 4)
    assert first != second and not first.exists() and second.is_dir()
    (tmp_path / ".removed_step_000001_0").mkdir()
    assert newest_checkpoint(tmp_path) == (path, [])
    remove_leftovers(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["step_000002"]


def test_old_checkpoints_that_a_killed_run_did_not_remove_go(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step)
    (tmp_path / "step_000006" / "x.distcp").unlink()  # of no use, so it doesn't count
    remove_old(tmp_path, keep=2)
    assert [file.name for file in complete_checkpoints(tmp_path)] == ["step_000002", "step_000004"]
    remove_old(tmp_path, keep=1)
    assert [file.name for file in complete_checkpoints(tmp_path)] == ["step_000004"]
