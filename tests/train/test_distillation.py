"""Distillation in whole steps and runs: from the policy itself, and from another model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megatron_gspo.config import Config
from megatron_gspo.tracking import read_metrics
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, first_step, launch, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def sharper(model: str) -> str:
    """The same model with logits thirty times as large."""
    teacher = Path(shutil.copytree(model, Path(model).with_name("teacher")))
    weights = load_file(teacher / "model.safetensors")
    weights["lm_head.weight"] *= 30
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    return str(teacher)


def config_of(model: str, run_dir: Path, teacher: str, **distillation: Any) -> dict[str, Any]:
    return base_config(
        model,
        run_dir,
        algorithm={"name": "gspo_token", "epsilon_low": 0.05, "epsilon_high": 0.05},
        distillation={"teacher": teacher, **distillation},
        rollout={"rollout_batch_size": 16, "n_samples_per_prompt": 1},
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )


def first_step_figures(
    rank: int, world_size: int, config: dict[str, Any]
) -> tuple[float, float, float]:
    """`distillation/kl` of the first step, its largest advantage, and its term in the loss."""
    samples, metrics = first_step(Config.from_dict(config))
    largest = max(float(np.abs(sample.advantages).max()) for sample in samples)
    return metrics["distillation/kl"], largest, metrics.get("loss/distillation", 0.0)


@pytest.mark.parametrize(("forward_weight", "top_k"), [(0.0, 0), (1.0, 0), (0.5, "all")])
def test_there_is_nothing_to_learn_from_oneself(
    sharper: str, tmp_path: Path, forward_weight: float, top_k: int | str
) -> None:
    """In the two mini-batches of a step."""
    config = config_of(
        sharper, tmp_path / "run", sharper, forward_weight=forward_weight, top_k=top_k
    )
    config["optimizer"]["lr"] = 1e-7  # Adam's first step follows the gradient's rounding
    [(kl, largest, term)] = run_distributed(first_step_figures, 1, config)
    assert (kl, largest) == (0.0, 0.0)
    assert abs(term) < 1e-4


def test_a_run_is_scored_by_its_teacher(model: str, sharper: str, tmp_path: Path) -> None:
    first: dict[int | str, float] = {}
    for top_k in (0, 8, "all"):
        run_dir = tmp_path / f"top_{top_k}"
        config = config_of(model, run_dir, sharper, top_k=top_k)
        config["training"]["steps"] = 2
        launch(config)
        steps = [row for row in read_metrics(run_dir) if row["step"]]
        assert len(steps) == 2
        for row in steps:
            assert row["time/teacher"] > 0 and row["grad_norm"] > 0
            assert (row.get("loss/distillation", 0) > 0) == (top_k != 0)
            assert (0 < row.get("distillation/top_k_mass", 0) < 1) == (top_k == 8)
        first[top_k] = steps[0]["distillation/kl"]
    assert first[0] == first[8] == first["all"] > 1  # of the same samples


def test_each_source_has_its_teacher(model: str, sharper: str, tmp_path: Path) -> None:
    """On two replicas, one teacher being the policy itself."""
    run_dir = tmp_path / "run"
    config = config_of(model, run_dir, model, top_k=8)
    teachers = [{"name": "own", "teacher": model}, {"name": "sharp", "teacher": sharper}]
    del config["distillation"]["teacher"]
    config["distillation"]["teachers"] = teachers
    task = config["data"].pop("task")
    other = {**task, "kwargs": {"min_word_len": 5, "max_word_len": 6}}
    config["data"]["sources"] = [
        {"name": "sharp", "task": task, "weight": 3},
        {"name": "own", "task": other},
    ]
    config["training"]["steps"] = 1
    launch(config, 2)
    [step] = [row for row in read_metrics(run_dir) if row["step"]]
    assert step["distillation/kl/own"] == pytest.approx(0, abs=1e-6)
    assert step["distillation/kl/sharp"] > 1
    assert step["distillation/kl"] == pytest.approx(0.75 * step["distillation/kl/sharp"], rel=0.2)
    assert 0 < step["distillation/top_k_mass/own"] < step["distillation/top_k_mass/sharp"] < 1
