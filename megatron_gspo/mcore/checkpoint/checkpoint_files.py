"""The files of training checkpoints: which are complete, and how one is published, replaced and
removed.

A checkpoint ``step_NNNNNN`` is written as ``.partial_NNNNNN_...`` and renamed. ``state.json``, its
last file, lists every other file but the kept rollouts with its size; a directory that does not
match its list is not a checkpoint. Neither is a link, a copy under another name, or one under the
name of another step: such things are the user's (``given_names.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gspo.errors import RunError, existing_part, show_bytes
from megatron_gspo.given_names import CHECKPOINTS, RANDOM_END, folders_named, move_aside

STATE = "state.json"
RANK_FILE = ".distcp"  # suffix of what a rank writes and flushes
ROLLOUTS = "rollout.bin"  # written before or after the rest is complete, so it is not listed


class CheckpointError(RunError):
    """A checkpoint that can't be written or read: one line with the path, the problem and the
    fix.
    """


def checkpoint_path(folder: Path, step: int) -> Path:
    """The directory of the checkpoint after ``step``."""
    return folder / CHECKPOINTS.file_name(step)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """An empty directory to write into, with a unique name.

    Ranks of a killed run may outlive it briefly; they must not write into this run's directory.
    """
    remove_leftovers(folder)
    partial = folder / f".partial_{step:06d}_{uuid.uuid4().hex[:8]}"
    partial.mkdir(parents=True)
    return partial


def publish_checkpoint(
    partial: Path,
    final: Path,
    state: Mapping[str, object],
    *,
    keep: int,
    steps: Mapping[str, float] | None = None,
    base: str = "",
) -> None:
    """Complete ``partial`` with ``state`` (JSON-able) and the step counts of optimizer and
    schedule, rename it to ``final`` and remove all but the newest ``keep``. base: checksum of the
    weights that its adapters belong to; "" for whole weights. What stands at ``final`` and is no
    checkpoint of this step is kept under another name.

    Everything is on the disk before the rename, so that a power failure leaves no incomplete
    checkpoint; the ranks have flushed their own files.
    """
    files = [file for file in partial.rglob("*") if file.is_file() and file.name != ROLLOUTS]
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in files}
    content = {"state": dict(state), "steps": dict(steps or {}), "files": sizes, "base": base}
    (partial / STATE).write_text(json.dumps(content))
    for file in (*files, partial / STATE, partial):
        if file.suffix != RANK_FILE:
            _flush(file)
    if _foreign(final):
        move_aside(final)
    _remove(final)
    os.replace(partial, final)
    _flush(final.parent)
    remove_old(final.parent, keep=keep)


def remove_old(folder: Path, *, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints."""
    for old in complete_checkpoints(folder)[:-keep]:
        _remove(old)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run was writing or removing. Only the rank that writes may call this."""
    for path in folders_named(folder, rf"\.(partial|removed_step)_[0-9]{{6,}}_{RANDOM_END}"):
        shutil.rmtree(path, ignore_errors=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [
        path
        for path in CHECKPOINTS.entries(folder).values()
        if not _foreign(path) and not fault_of(path)
    ]


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, if any, and why each entry with the name of a newer one
    is not one.
    """
    faults: list[str] = []
    for path in reversed(CHECKPOINTS.named(folder).values()):
        if foreign := _foreign(path):
            faults.append(f"{path} is {foreign}")
        elif fault := fault_of(path):
            faults.append(f"{path} is incomplete ({fault})")
        else:
            return path, faults
    return None, faults


def room_left(folder: Path) -> str:
    """Free disk space and the size of the newest checkpoint, for the message of a failed save."""
    room = f" ({show_bytes(shutil.disk_usage(existing_part(folder)).free)} free"
    newest, _ = newest_checkpoint(folder)
    if newest is not None:
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        room += f", the last one takes {show_bytes(size)}"
    return room + ")"


def _foreign(path: Path) -> str:
    """What else than a checkpoint of this run has the name of one, in a few words; "" for a
    checkpoint, whole or not, and for nothing."""
    if path.is_symlink():
        return "a link"
    if path.is_file():
        return "a file"
    try:
        step = json.loads((path / STATE).read_text(encoding="utf-8"))["state"]["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if step == CHECKPOINTS.step(path.name) else f"a copy of step {step}"


def fault_of(path: Path) -> str:
    """Why a directory is not a complete checkpoint, in a few words; "" for a complete one."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {STATE}"
    except OSError as error:
        return f"{STATE} can't be read: {(error.strerror or type(error).__name__).lower()}"
    except ValueError:
        return f"{STATE} is not JSON"
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), dict) for key in ("state", "files")
    ):
        return f"{STATE} has no list of files"
    for name, size in content["files"].items():
        file = path / name
        if not os.path.isfile(file):
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name}: {file.stat().st_size} of {size} bytes"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """The ``state`` of a complete checkpoint."""
    return dict(json.loads((path / STATE).read_text(encoding="utf-8"))["state"])


def check_base(path: Path, base: str) -> None:
    """Raise ``CheckpointError`` unless a checkpoint is of adapters to the weights with the checksum
    ``base``, or for "" of whole weights."""
    stored_base = json.loads((path / STATE).read_text(encoding="utf-8")).get("base", "")
    if stored_base == base:
        return
    if not stored_base or not base:
        kinds = ("adapters", "whole weights") if stored_base else ("whole weights", "adapters")
        problem = (
            "{} holds {}, the run trains {}; set lora.rank as it was, or another run_dir".format(
                path, *kinds
            )
        )
    else:
        problem = (
            f"{path} holds adapters to weights with checksum {stored_base}, model.path has {base}; set"
            " model.path back"
        )
    raise CheckpointError(problem)


def _remove(checkpoint: Path) -> None:
    """Rename first, so that a partly removed directory never has a checkpoint's name."""
    if not checkpoint.exists():
        return
    removed = checkpoint.with_name(f".removed_{checkpoint.name}_{uuid.uuid4().hex[:8]}")
    os.replace(checkpoint, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
