"""Which directories are complete checkpoints, beside those that a killed run or a broken disk
left.
"""

from __future__ import annotations

import json
import shutil
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
    publish_checkpoint(
        partial, checkpoint_path(folder, step), {"step": step, "cursor": 8 * step}, keep=keep
    )
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


def test_a_killed_save_leaves_nothing_that_counts(tmp_path):
    """Two writers of the same step never share a directory; what they leave goes with the next
    save.
    """
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


COPIES = (
    "step_000001_best",
    "latest",
    "step_9",
)


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_user_are_neither_read_counted_nor_removed(tmp_path, name):
    write(tmp_path, 1)
    newest = write(tmp_path, 4)
    shutil.copytree(tmp_path / "step_000001", tmp_path / name)
    assert newest_checkpoint(tmp_path) == (newest, [])
    for step in (6, 8):
        write(tmp_path, step, keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000006", "step_000008"]
    assert fault_of(tmp_path / name) == ""


def test_a_copy_under_another_step_is_no_checkpoint(tmp_path):
    """It would be taken for the newest for ever, and the real newest would be removed as an old
    one.
    """
    newest = write(tmp_path, 2)
    shutil.copytree(newest, tmp_path / "step_000123")
    said = f"{tmp_path}/step_000123 is a copy of step 2"
    assert newest_checkpoint(tmp_path) == (newest, [said])
    write(tmp_path, 4, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000123"]


def test_links_are_not_the_runs(tmp_path):
    elsewhere = write(tmp_path / "elsewhere", 9)
    folder = tmp_path / "checkpoints"
    newest = write(folder, 2)
    (folder / "step_000009").symlink_to(elsewhere)
    (folder / "step_000010").symlink_to(tmp_path / "nowhere")
    (folder / "step_000011").write_text("a note")
    (folder / "latest").symlink_to("step_000002")
    faults = [
        f"{folder}/step_000011 is a file",
        f"{folder}/step_000010 is a link",
        f"{folder}/step_000009 is a link",
    ]
    assert newest_checkpoint(folder) == (newest, faults)
    write(folder, 4, keep=1)
    assert fault_of(elsewhere) == "" and (folder / "step_000009").is_symlink()
    assert [path.name for path in complete_checkpoints(folder)] == ["step_000004"]


@pytest.mark.parametrize("occupant", ["link", "dangling link", "file", "copy"])
def test_what_stands_where_a_checkpoint_goes_is_kept(tmp_path, capsys, occupant):
    elsewhere = write(tmp_path / "elsewhere", 9)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if occupant == "copy":
        shutil.copytree(elsewhere, folder / "step_000003")
    elif occupant == "file":
        (folder / "step_000003").write_text("a note")
    else:
        (folder / "step_000003").symlink_to(
            elsewhere if occupant == "link" else tmp_path / "nowhere"
        )
    path = write(folder, 3)
    assert fault_of(path) == "" and not path.is_symlink() and fault_of(elsewhere) == ""
    assert sorted(entry.name for entry in folder.iterdir()) == ["step_000003", "step_000003.kept"]
    assert (
        capsys.readouterr().err
        == f"warning: {path} was there and is not this run's: it is now {path}.kept\n"
    )
    remove_leftovers(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step_000003", "step_000003.kept"]


def test_leftovers_are_only_what_a_save_names(tmp_path):
    kept = (".partial_best", ".removed_by_me", ".partial_000004", ".DS_Store", "lost+found")
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".partial_000004_0123abcd").symlink_to(tmp_path / "lost+found")
    (tmp_path / ".partial_000006_0123abcd").mkdir()
    (tmp_path / ".removed_step_000002_0123abcd").mkdir()
    remove_leftovers(tmp_path)
    names = sorted((*kept, ".partial_000004_0123abcd"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
