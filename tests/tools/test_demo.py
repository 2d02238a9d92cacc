"""The demo: the order of its steps, its summary, its exit codes. The trainings themselves are replaced."""

from __future__ import annotations

import json

import pytest

from megatron_gspo.config import load_config
from megatron_gspo.errors import InputError
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
        run_dir = next(word.partition("=")[2] for word in reversed(command) if word.startswith("run_dir="))
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
    assert "held-out accuracy   25.0 % before GSPO, 75.0 % after" in shown and "(50.0 % in Transformers)" in shown
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
    said = f"error: --folder {tmp_path}: is not empty and holds no demo; choose another folder\n"
    assert capsys.readouterr().err == said and started == []
    assert (tmp_path / "model" / "config.json").read_text() == "mine"


def test_a_failed_training_ends_the_demo_with_its_code(monkeypatch, tmp_path):
    monkeypatch.setattr(cold_start, "run_one", lambda command: 7)
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--folder", str(tmp_path / "demo")])
    assert stopped.value.code == 7


def test_an_error_of_the_user_is_one_line(monkeypatch, capsys):
    def fails(*arguments: object) -> None:
        raise InputError("no space; free some")

    monkeypatch.setattr(demo, "run_demo", fails)
    assert demo.main([]) == 2
    assert capsys.readouterr().err.endswith("no space; free some\n")


@pytest.mark.parametrize("file", [demo.COLD_START, demo.GSPO])
def test_the_configs_are_valid_on_the_default_number_of_processes(file, tmp_path):
    load_config(file, [f"run_dir={tmp_path}"])
