"""Whole runs from the command line: what they write, and that a resumed run ends like one that
wasn't interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training_runs import base_config, exported, launch, records, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A GSPO run of four steps on four processes, TP 2 and EP 2, with a checkpoint after the
    second.
    """
    config = base_config(
        model,
        tmp_path_factory.mktemp("runs") / "gspo",
        training={"steps": 4},
        parallel={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        evaluation={"n_samples": 2, "pass_at_k": [2], "eval_interval": 2},
        checkpoint={"save_interval": 2, "keep": 1},
    )
    done = launch(config, 4)
    return config, Path(config["run_dir"]), done


def test_a_run_writes_its_directory(finished):
    config, folder, done = finished
    steps = records(folder)
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    for name in (
        "reward/mean",
        "clip_fraction/tokens",
        "clip_fraction/sequences",
        "ratio_sequence/p99",
        "ratio_token/p99",
        "mismatch/k3",
        "entropy",
        "grad_norm",
        "kl/old_policy",
        "groups/zero_variance",
    ):
        assert steps[-1][name] is not None, name
    assert {"eval/accuracy", "eval/pass@2"} <= set(steps[0]) & set(steps[2]) & set(steps[4])
    assert steps[1]["updates"] == 2 and steps[1]["mismatch/abs_diff_max"] < 1e-4
    assert done.log.count("verifier spelling: the sum of the letters\n") == 1, (
        "what the verifier says, of one rank"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit"] == "finished" and summary["step"] == 4 and summary["wall_seconds"] > 0
    assert summary["accuracy_before"] == steps[0]["eval/accuracy"]
    assert summary["accuracy_after"] == steps[-1]["eval/accuracy"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000004"]
    samples = [
        json.loads(line)
        for line in (folder / "samples" / "step_000004.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 4 and all("Spell this word" in sample["prompt"] for sample in samples)
    assert "step 4/4" in done.log


def test_the_export_is_the_trained_model(finished):
    config, folder, _ = finished
    before = load_file(Path(config["model"]["path"]) / "model.safetensors")
    after = exported(folder)
    assert {name: value.shape for name, value in before.items()} == {
        name: value.shape for name, value in after.items()
    }
    assert not [name for name in before if torch.equal(before[name], after[name])]
    assert (folder / "hf" / "tokenizer.json").is_file()
    assert (folder / "hf" / "config.json").is_file()


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(finished, tmp_path):
    """Stopped after two of four steps and started again: bitwise the same weights, and the same
    metrics.
    """
    config, folder, _ = finished
    again = {**config, "run_dir": str(tmp_path / "again")}
    launch(again, 4, "training.steps=2")
    first = launch(again, 4)
    assert "resumed from" in first.log and "step 2" in first.log
    ours = exported(tmp_path / "again")
    theirs = exported(folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert records(tmp_path / "again") == records(folder)


def test_layouts_agree(finished, tmp_path):
    """The same run on one process draws the same samples and follows the same course."""
    config, folder, _ = finished
    single = {**config, "run_dir": str(tmp_path / "single"), "parallel": {}}
    launch(single, 1)
    for ours, theirs in zip(records(tmp_path / "single")[:3], records(folder), strict=False):
        assert ours["step"] == theirs["step"]
        for name in (
            "reward/mean",
            "response_length/mean",
            "entropy",
            "loss",
            "grad_norm",
            "eval/accuracy",
        ):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), (
                    ours["step"],
                    name,
                )


def test_a_run_that_is_at_its_end_says_so(finished):
    config, folder, _ = finished
    done = launch(config, 4)
    assert (
        f"{folder} is trained: it is at step 4, training.steps is 4; more steps continue it"
        in done.log
    )
    assert [row["step"] for row in records(folder)] == [0, 1, 2, 3, 4]


def test_supervised_cold_start(model, tmp_path):
    config = base_config(
        model,
        tmp_path / "sft",
        algorithm={"name": "sft"},
        training={"steps": 25, "global_batch_size": 16},
        optimizer={"lr": 5e-3},
        rollout={"engine": "sft", "rollout_batch_size": 16, "n_samples_per_prompt": 1},
        evaluation={"at_start": False},
        parallel={"pipeline_model_parallel_size": 2},
    )
    launch(config, 2)
    steps = records(config["run_dir"])
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"] and "eval/accuracy" in steps[-1]
