"""The command on real runs: the training loop's accuracy, steps, a kill, and the page."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron_gspo.tools.evaluate.__main__ import main
from tests.support.command_line import ROWS, VERIFIER, in_fork, write_rows
from tests.support.training_runs import base_config, launch, records, tiny_model
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]
EPISODES = {
    "environment": f"{ROOT}/examples/environments/spell_backward.py:spell_backward",
    "max_turns": 2,
    "max_turn_length": 6,
    "max_response_length": 60,
}
AGENT = f"{ROOT}/examples/agents/spell_backward.py:spell_backward"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps with an evaluation and a checkpoint after each."""
    folder = tmp_path_factory.mktemp("evaluated")
    model = tiny_model(folder / "model")
    config = base_config(
        model,
        folder / "run",
        evaluation={"eval_interval": 1, "n_samples": 3, "pass_at_k": [1, 2]},
        checkpoint={"save_interval": 1, "keep": 9},
        optimizer={"lr": 2e-2},
    )
    launch(config)
    return folder / "run"


def test_every_step_has_the_training_loops_accuracy(run, tmp_path, capsys):
    assert main([str(run), "--steps", "all", "--output", str(tmp_path)]) == 0
    scores = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
    assert [each["step"] for each in scores] == [1, 2, 3]
    trained = {record["step"]: record for record in records(run)}
    # The steps differ, so the comparison says something.
    assert len({each["accuracy"]["mean"] for each in scores}) == 3
    for each in scores:
        record = trained[each["step"]]
        # Rewards are float32.
        assert each["accuracy"]["mean"] == pytest.approx(record["eval/accuracy"], abs=1e-7)
        assert each["pass_at_k"]["2"]["mean"] == pytest.approx(record["eval/pass@2"], abs=1e-12)
        assert each["response_length"] == record["eval/response_length"]
    assert [each["difference"] is None for each in scores] == [True, False, False]
    *lines, file = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"held_out, step_00000{i}" for i in (1, 2, 3)]
    assert file == str(tmp_path / "evaluation.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "responses"]


def evaluate(model: str, folder: Path, tasks: Path, *more: str) -> int:
    return main(
        [
            model,
            "--tasks",
            str(tasks),
            "--output",
            str(folder),
            "model.dtype=float32",
            "seed=3",
            "data.verifier_timeout=null",
            f"data.verifier={VERIFIER}:score",
            "evaluation.n_samples=2",
            "rollout.max_response_length=24",
            "rollout.max_batch_size=4",
            *more,
        ]
    )


def test_runs_of_agents_and_episodes_are_those_of_the_training_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "model")
    played = {
        "agents": {"agents": {"function": AGENT, "max_calls": 3, "max_context": 80}},
        "episodes": {"rollout": EPISODES},
    }
    for name, sections in played.items():
        config = base_config(
            model,
            tmp_path / name,
            training={"steps": 1},
            evaluation={"n_samples": 2, "at_start": False},
            optimizer={"lr": 2e-2},
        )
        config["data"]["verifier"] = None
        for section, values in sections.items():
            config[section] = config.get(section, {}) | values
        launch(config)
        output = tmp_path / f"{name}_scores"
        assert main([config["run_dir"], "--output", str(output)]) == 0
        [score] = json.loads((output / "evaluation.json").read_text())["scores"]
        [record] = records(config["run_dir"])
        assert score["accuracy"]["mean"] == pytest.approx(record["eval/accuracy"], abs=1e-7)
        assert score["response_length"] == record["eval/response_length"]
        lines = next((output / "responses").rglob("*.jsonl")).read_text().splitlines()
        turns = [len(json.loads(line)["metadata"]["turns"]) for line in lines[1:]]
        assert len(turns) == 16 and max(turns) > 1
        capsys.readouterr()


def test_without_scipy_nothing_is_generated(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    tasks = write_rows(tmp_path / "words.jsonl", ROWS)
    assert evaluate(str(tmp_path / "model"), tmp_path / "out", tasks) == 2
    assert "needs scipy: pip install 'megatron-gspo[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_killed_evaluation_is_continued_to_the_same_bytes(run, tmp_path):
    model = str(run / "hf")
    tasks = write_rows(
        tmp_path / "words.jsonl",
        [{**row, "prompt": row["prompt"] + "x" * i} for i, row in enumerate(ROWS * 5)],
    )
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert in_fork(lambda: evaluate(model, whole, tasks)).code in (0, None)
    name = Path("responses") / "hf" / "words.jsonl"
    child = multiprocessing.get_context("fork").Process(
        target=evaluate, args=(model, killed, tasks)
    )
    child.start()
    third = (whole / name).stat().st_size / 3
    wait_for(
        lambda: (killed / name).is_file() and (killed / name).stat().st_size >= third,
        pause=0.002,
        alive=child.is_alive,
    )
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    kept_bytes = (killed / name).read_bytes()
    assert (
        0 < len(kept_bytes) < (whole / name).stat().st_size
        and not (killed / "evaluation.json").exists()
    )
    assert in_fork(lambda: evaluate(model, killed, tasks)).code in (0, None)
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
    first, second = (json.loads((each / "evaluation.json").read_text()) for each in (whole, killed))
    assert first["scores"] == second["scores"]
