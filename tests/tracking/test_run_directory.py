"""What a run leaves behind, and what a resumed run does to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_gspo.tracking import RunDirectory, describe_environment, evenly_spaced, read_metrics
from megatron_gspo.tracking.run_environment import git_revision


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_one_object_a_step_is_on_disk_at_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "run")
    values = {
        "reward/mean": torch.tensor(0.5),
        "n": 3,
        "x": np.float32(0.25),
        "bad": float("nan"),
        "worse": torch.inf,
    }
    assert run.log(1, values) == {"reward/mean": 0.5, "n": 3, "x": 0.25, "bad": None, "worse": None}
    text = (tmp_path / "a" / "run" / "metrics.jsonl").read_text()  # not closed yet
    assert text.count("\n") == 1
    assert json.loads(text) == {"step": 1, "reward/mean": 0.5, "n": 3, "x": 0.25, "bad": None, "worse": None}


def test_a_step_is_logged_once_and_in_order(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.log(0, {})
    run.log(2, {})
    for step in (2, 1):
        with pytest.raises(ValueError, match=f"step = {step}: is not after step 2"):
            run.log(step, {})
    assert steps(tmp_path) == [0, 2]


def test_resume_forgets_what_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in range(6):
            run.log(step, {"x": step})
            run.write_samples(step, [{"response": str(step)}])
        run.write_summary({"state": "finished"})
    with RunDirectory(tmp_path, resume_step=3) as run:
        assert steps(tmp_path) == [0, 1, 2, 3]
        assert sorted(file.name for file in run.samples.iterdir()) == [
            f"step_{i:06d}.jsonl" for i in range(4)
        ]
        assert not run.summary.exists()
        run.log(4, {"x": 40})
    assert [record["x"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3, 40]


def test_half_a_line_at_the_end_is_dropped(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.log(1, {"x": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    assert steps(tmp_path) == [1]
    with RunDirectory(tmp_path, resume_step=1) as run:
        run.log(2, {"x": 2})
    assert steps(tmp_path) == [1, 2]


def test_a_run_from_nothing_starts_empty_or_is_refused(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.log(1, {})
    with pytest.raises(FileExistsError, match="run_dir = .*: holds another run; choose another run_dir"):
        RunDirectory(tmp_path, reuse=False)
    assert steps(tmp_path) == [1]
    with RunDirectory(tmp_path):
        assert steps(tmp_path) == []


def test_a_killed_process_loses_no_finished_step(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom megatron_gspo.tracking import RunDirectory\n"
        "run = RunDirectory(sys.argv[1])\nrun.log(1, {'x': 1})\nrun.log(2, {'x': 2})\nos._exit(9)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert process.returncode == 9
    assert steps(tmp_path) == [1, 2]


def test_samples_keep_their_text(tmp_path: Path) -> None:
    file = RunDirectory(tmp_path).write_samples(12, [{"prompt": "2 × 3\n=", "reward": 1.0}, {"prompt": "ß"}])
    assert file.name == "step_000012.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": "2 × 3\n=", "reward": 1.0}, {"prompt": "ß"}]


def test_summary_is_whole_or_absent(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_summary(
        {"accuracy_after": 0.5, "none": None, "nan": float("nan"), "path": tmp_path, "list": [1]}
    )
    assert json.loads(run.summary.read_text()) == {
        "accuracy_after": 0.5,
        "none": None,
        "nan": None,
        "path": str(tmp_path),
        "list": [1],
    }
    with pytest.raises(TypeError):
        run.write_summary({"x": object()})
    assert json.loads(run.summary.read_text())["accuracy_after"] == 0.5  # the old one is still there
    assert not list(tmp_path.glob("*.tmp"))


def test_config_yaml(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_config(
        {"seed": 3, "model": {"path": "m"}}, describe_environment(world_size=4)
    )
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    environment = content.pop("environment")
    assert content == {"seed": 3, "model": {"path": "m"}}
    assert environment["world_size"] == 4 and environment["host"] == os.uname().nodename
    assert torch.__version__.startswith(environment["versions"]["torch"])


def test_git_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert git_revision(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == head + "+changes"
    (tmp_path / "site-packages").mkdir()
    assert git_revision(tmp_path / "site-packages") is None


@pytest.mark.parametrize(
    "count, expected", [(0, []), (1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))]
)
def test_evenly_spaced(count: int, expected: list[int]) -> None:
    assert evenly_spaced(range(10), count) == expected
