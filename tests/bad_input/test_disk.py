"""Files that can't be written: the run ends with the reason, and the last good checkpoint is as
it was.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint
from tests.bad_input.test_rollouts import MyEngine
from tests.support.command_line import Case, check, small_config, start, with_engine


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: a full disk that needs no privilege
    and spares the rest.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def digest(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


CASES = (
    (
        Case(
            "config on a full disk",
            "cannot be written: file too large",
            code=1,
            shows=("/run: ", " free)"),
        ),
        100,
        {},
    ),
    (
        Case(
            "export on a full disk",
            "cannot be written: file too large",
            code=1,
            shows=("hf.partial", " needed, "),
        ),
        12_000,
        {"export_hf": True},
    ),
    (
        Case(
            "checkpoint on a full disk",
            "checkpoint not written; the last one is untouched",
            code=1,
            shows=("File too large", " free)"),
        ),
        12_000,
        {"save_interval": 1},
    ),
)


@pytest.mark.parametrize(
    ("case", "size", "checkpoint"), CASES, ids=lambda value: getattr(value, "name", "")
)
def test_full_disk(case, size, checkpoint, model, tmp_path):
    config = small_config(model, tmp_path, checkpoint=checkpoint)
    with largest_file(size):
        outcome = with_engine(config, MyEngine())
    check(case, outcome)


FULL_AGAIN = Case(
    "a later checkpoint on a full disk",
    "checkpoint not written; the last one is untouched",
    code=1,
    shows=(" free, the last one takes ",),
)


def test_the_last_checkpoint_survives_a_full_disk(model, tmp_path):
    config = small_config(model, tmp_path, checkpoint={"save_interval": 1})
    assert with_engine(config, MyEngine()).code == 0
    folder = Path(config["run_dir"]) / "checkpoints"
    before = digest(folder / "step_000001")
    config["training"]["steps"] = 3
    with largest_file(12_000):
        check(FULL_AGAIN, with_engine(config, MyEngine()))
    after = digest(folder / "step_000001")
    assert {name: after[name] for name in before} == before  # the kept rollouts may have come
    assert newest_checkpoint(folder)[0] == folder / "step_000001"
    done = with_engine(config, MyEngine())
    assert done.code == 0 and f"resumed from {folder / 'step_000001'}" in done.text


def test_metrics_on_a_full_disk(model, tmp_path):
    """Rank 0 alone meets it, in the middle of a run: the records grow by about 2 kB a step."""
    config = small_config(model, tmp_path, training={"steps": 6})
    config["tracking"]["samples_per_step"] = 0
    case = Case(
        "metrics on a full disk",
        "cannot be written: file too large",
        code=1,
        shows=("metrics.jsonl",),
    )
    with largest_file(9_000):  # config.yaml takes 7,000
        check(case, with_engine(config, MyEngine()))


class Removing(MyEngine):
    """Removes the run directory when it generates for the second time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.count = 0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == 2:
            shutil.rmtree(self.folder)
        return super().generate(*args, **kwargs)


def test_run_directory_removed_under_the_run(model, tmp_path):
    config = small_config(model, tmp_path, training={"steps": 3})
    case = Case(
        "run directory removed",
        "don't remove a run's directory while it runs",
        code=1,
        shows=("samples",),
    )
    check(case, with_engine(config, Removing(tmp_path / "run")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_dir_without_permission(model, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    config = small_config(model, tmp_path) | {"run_dir": str(tmp_path / "locked" / "run")}
    check(
        Case("run_dir without permission", "can't be written by this user"), start(config, tmp_path)
    )
