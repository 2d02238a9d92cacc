"""The comparison of two runs finds every kind of difference, also those that ``==`` does not."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save

from tests.fault_injection.bitwise_diff import first_difference


def write_checkpoint(folder: Path, moment: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(
            {"weight": torch.ones(2, 3), "moment": moment, "rest": {"steps": 4}},
            checkpoint_id=folder,
            no_dist=True,
        )
    state = {"state": {"step": 4, "cursor": 8, "wall_seconds": 1.0}, "steps": {"weight": 4}}
    (folder / "state.json").write_text(json.dumps(state))


def write_run(folder: Path) -> Path:
    for name in ("hf", "critic_hf", "samples", "checkpoints"):
        (folder / name).mkdir(parents=True)
    for name in ("hf", "critic_hf"):
        save_file({"a": torch.tensor([0.0, float("nan")])}, folder / name / "model.safetensors")
    (folder / "samples" / "step_000004.jsonl").write_text('{"reward": 1.0}\n')
    (folder / "metrics.jsonl").write_text(
        '{"step": 0}\n{"step": 1, "loss": 0.1, "time/step": 1.5}\n'
    )
    (folder / "summary.json").write_text('{"step": 4, "wall_seconds": 2.5}')
    write_checkpoint(folder / "checkpoints" / "step_000004", torch.zeros(2))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "run")


def change_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000004")
    write_checkpoint(run / "checkpoints" / "step_000004", torch.tensor([0.0, -0.0]))


def change_metric(run: Path) -> None:
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace("0.1", "0.10000000000000002"))


CHANGES = {
    "hf/model.safetensors: a": lambda run: save_file(
        {"a": torch.tensor([-0.0, float("nan")])}, run / "hf" / "model.safetensors"
    ),
    "critic_hf/model.safetensors: a": lambda run: save_file(
        {"a": torch.tensor([0.0, 1.0])}, run / "critic_hf" / "model.safetensors"
    ),
    "hf/ holds more in one run only": lambda run: (run / "hf" / "more").touch(),
    "samples/step_000004.jsonl": (
        lambda run: (run / "samples" / "step_000004.jsonl").write_text('{"reward": 1}\n')
    ),
    "checkpoints/step_000004: moment": change_checkpoint,
    "metrics.jsonl, step 1: loss = 0.10000000000000002, not 0.1": change_metric,
    "metrics.jsonl has the steps [0], not [0, 1]": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n')
    ),
    "summary.json: step = 5, not 4": lambda run: (run / "summary.json").write_text('{"step": 5}'),
    "checkpoints/.partial_000006_0 was left behind": (
        lambda run: (run / "checkpoints" / ".partial_000006_0").mkdir()
    ),
}


@pytest.mark.parametrize("difference", CHANGES)
def test_each_difference_is_named(run, tmp_path, difference):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert first_difference(other, run) == ""
    CHANGES[difference](other)
    assert first_difference(other, run) == difference
