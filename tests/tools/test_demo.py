"""The demo: the order of its steps, its summary, its exit codes.

The trainings themselves are replaced.
"""

from __future__ import annotations

import json

import pytest

from megatron_gspo.tools import demo
from megatron_gspo.tools.compare import cold_start
from megatron_gspo.tools.compare.study_plan import ColdStartFiles

SUMMARY = {"accuracy_before": 0.25, "accuracy_after": 0.75, "wall_seconds": 12.0}


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands of the trainings, which only write the last run's summary."""
    commands: list[list[str]] = []

    def run_one(command: list[str]) -> int:
        commands.append(command)
        run_dir = next(
            word.partition("=")[2] for word in reversed(command) if word.startswith("run_dir=")
        )
        if run_dir.endswith("gspo"):
            demo.Path(run_dir).mkdir()
            (demo.Path(run_dir) / "summary.json").write_text(json.dumps(SUMMARY))
        return 0

    monkeypatch.setattr(cold_start, "run_one", run_one)
    monkeypatch.setattr(demo, "transformers_accuracy", lambda model, config: 0.5)
    return commands


def test_the_cold_start_s_weights_are_what_gspo_begins_with(started, tmp_path, capsys):
    folder = tmp_path / "demo"
    assert demo.main(["training.steps=2", "--folder", str(folder), "--processes", "2"]) == 0
    files = ColdStartFiles(folder)
    assert (files.model / "config.json").is_file()
    first, second = started
    assert str(demo.COLD_START) in first and f"model.path={files.model}" in first
    assert str(demo.GSPO) in second and f"model.path={files.weights}" in second
    assert "training.steps=2" in first and "training.steps=2" in second
    shown = capsys.readouterr().out
    assert (
        "held-out accuracy   25.0 % before GSPO, 75.0 % after" in shown
        and "(50.0 % in Transformers)" in shown
    )
    summary = json.loads((folder / "gspo" / "summary.json").read_text())
    assert summary["accuracy_transformers"] == 0.5 and summary["demo_wall_seconds"] > 0


def test_an_earlier_demo_is_replaced_and_nothing_else(started, tmp_path):
    folder = tmp_path / "demo"
    arguments = ["--folder", str(folder), "--processes", "2"]
    assert demo.main(arguments) == 0
    (folder / "gspo" / "samples").mkdir()
    (folder / "notes.md").write_text("mine")
    (folder / "gspo_best").mkdir()
    assert demo.main(arguments) == 0
    assert (folder / "notes.md").read_text() == "mine" and (folder / "gspo_best").is_dir()
    assert sorted(path.name for path in (folder / "gspo").iterdir()) == ["summary.json"]


def test_a_folder_of_the_user_is_not_a_demo(started, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    assert demo.main(["--folder", str(tmp_path)]) == 2
    said = (
        f"demo error: --folder {tmp_path}: is not empty and holds no demo; choose another folder\n"
    )
    assert capsys.readouterr().err == said and started == []
    assert (tmp_path / "model" / "config.json").read_text() == "mine"


def settings(command: list[str]) -> dict[str, str]:
    """The last value of each key of a command."""
    return dict(word.split("=", 1) for word in command if "=" in word)


@pytest.mark.parametrize(
    ("steps", "cold", "gspo"),
    [(1, 0, 2), (2, 1, 4), (10, 5, None), (30, 15, None), (31, None, None)],
)
def test_fewer_steps_than_the_warm_up(started, tmp_path, steps, cold, gspo):
    """The help's own example: the cold start warms up for 30 steps, GSPO for 10 with four
    updates a step.
    """
    assert demo.main([f"training.steps={steps}", "--folder", str(tmp_path / "demo")]) == 0
    shown = [settings(command).get("optimizer.lr_warmup_steps") for command in started]
    assert shown == [None if number is None else str(number) for number in (cold, gspo)]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["--processes", "3"],
            ("--processes 3: ", "does not divide 3 processes", "start a multiple of 2"),
        ),
        (["--processes", "0"], ("--processes 0: at least 2 are needed",)),
        (["training.steps=0"], ("training.steps",)),
        (["run_dir=elsewhere"], ("run_dir: the demo sets it itself",)),
        (["optimizer.lr_warmup_steps=4000"], ("optimizer.lr_warmup_steps",)),
    ],
)
def test_what_cannot_run_is_one_line_and_replaces_nothing(
    started, tmp_path, capsys, arguments, shown
):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "demonstrations.jsonl").write_text("of an earlier demo")
    assert demo.main([*arguments, "--folder", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 1 and "error: " in lines[0] and all(words in lines[0] for words in shown)
    ), lines
    assert started == [] and (folder / "demonstrations.jsonl").read_text() == "of an earlier demo"
