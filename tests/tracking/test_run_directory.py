"""What a run leaves behind, and what a resumed run does to it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_gspo.tracking import RunDirectory, describe_environment, read_metrics


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
    assert json.loads(text) == {
        "step": 1,
        "reward/mean": 0.5,
        "n": 3,
        "x": 0.25,
        "bad": None,
        "worse": None,
    }


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
    with pytest.raises(
        FileExistsError, match="run_dir = .*: holds another run; choose another run_dir"
    ):
        RunDirectory(tmp_path, reuse=False)
    assert steps(tmp_path) == [1]
    with RunDirectory(tmp_path):
        assert steps(tmp_path) == []


COPIES = (
    "step_000001 (copy).jsonl",
    "step_000009.bak.jsonl",
    "step_000002.jsonl.bak",
    "step_000002.jsonl~",
    "step_best.jsonl",
    "step_.jsonl",
    ".step_000002.jsonl.swp",
    ".DS_Store",
    "notes.tmp",
)


@pytest.mark.parametrize("folder, end", [("samples", "jsonl"), ("ratios", "npz")])
def test_what_people_keep_beside_samples_stays(tmp_path: Path, folder: str, end: str) -> None:
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3):
            run.log(step, {})
            run.write_samples(step, [{"step": step}])
            run.write_ratios(step, {"log_ratio": np.zeros(1)})
    names = [name.replace("jsonl", end) for name in COPIES]
    for name in names:
        (tmp_path / folder / name).write_text("mine")
    (tmp_path / folder / "lost+found").mkdir()
    (tmp_path / folder / f"step_000008.{end}").mkdir()
    (tmp_path / folder / f"step_000009.{end}").symlink_to(tmp_path / "nowhere")
    (tmp_path / "my notes.tmp").write_text("mine")
    for leftover in (tmp_path / "summary.json.tmp", tmp_path / folder / f"step_000003.{end}.tmp"):
        leftover.write_text("half of it")
    RunDirectory(tmp_path, resume_step=1).close()
    theirs = [*names, "lost+found", f"step_000008.{end}", f"step_000009.{end}"]
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == sorted(
        [*theirs, f"step_000001.{end}"]
    )
    assert (tmp_path / "my notes.tmp").exists() and not (tmp_path / "summary.json.tmp").exists()


def finished_run(path: Path, reward: float) -> None:
    with RunDirectory(path) as run:
        run.write_config({"seed": 1}, {})
        run.log(1, {"reward/mean": reward})
        run.write_samples(1, [{"reward": reward}])
        run.write_summary({"exit": "finished"})
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text(str(reward))


def test_a_new_run_keeps_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    finished_run(tmp_path, 0.25)
    (tmp_path / "notes.md").write_text("mine")
    finished_run(tmp_path, 0.5)
    run = RunDirectory(tmp_path)
    assert run.earlier == tmp_path / "earlier_2"
    for number, reward in ((1, 0.25), (2, 0.5)):
        earlier = tmp_path / f"earlier_{number}"
        assert [record["reward/mean"] for record in read_metrics(earlier)] == [reward]
        assert json.loads((earlier / "samples" / "step_000001.jsonl").read_text()) == {
            "reward": reward
        }
        assert (earlier / "hf" / "config.json").read_text() == str(reward)
        assert (earlier / "summary.json").is_file() and (earlier / "config.yaml").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "earlier_1",
        "earlier_2",
        "metrics.jsonl",
        "notes.md",
        "samples",
    ]
    assert steps(tmp_path) == [] and list(run.samples.iterdir()) == []


def test_a_start_that_logged_nothing_leaves_no_earlier_run(tmp_path: Path) -> None:
    for _ in range(2):
        run = RunDirectory(tmp_path)
        run.write_config({"seed": 1}, {})
        assert run.earlier is None
        run.close()
    with RunDirectory(tmp_path) as run:
        run.log(1, {})
    assert RunDirectory(tmp_path, resume_step=1).earlier is None  # it continues


def test_an_earlier_run_on_another_disk_stays_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").symlink_to("../disk")
    finished_run(tmp_path / "run", 0.5)
    RunDirectory(tmp_path / "run").close()
    file = tmp_path / "run" / "earlier_1" / "samples" / "step_000001.jsonl"
    assert json.loads(file.read_text()) == {"reward": 0.5}
    assert (tmp_path / "disk" / file.name).exists()


def test_samples_keep_their_text(tmp_path: Path) -> None:
    file = RunDirectory(tmp_path).write_samples(
        12, [{"prompt": "2 × 3\n=", "reward": 1.0}, {"prompt": "ß"}]
    )
    assert file.name == "step_000012.jsonl"
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert samples == [{"prompt": "2 × 3\n=", "reward": 1.0}, {"prompt": "ß"}]


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
    # The old one is still there.
    assert json.loads(run.summary.read_text())["accuracy_after"] == 0.5
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
