"""PPO as whole runs: its metrics, warm-up, exact resume, and another layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megatron_gspo.tools.convert import __main__ as convert
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from megatron_gspo.tracking import read_metrics
from tests.fault_injection.bitwise_diff import first_difference
from tests.support.training_runs import WORD, base_config, exported, launch, tiny_model

CRITIC = {
    "critic/loss",
    "critic/clip_fraction",
    "critic/value",
    "critic/return",
    "critic/explained_variance",
    "critic/grad_norm",
    "critic/lr",
    "time/values",
    "time/train_critic",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model: str, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "ppo", "kl_reward_coef": 0.05},
        "rollout": {"rollout_batch_size": 16, "n_samples_per_prompt": 1},
        "critic": {"lr": 1e-3, "lr_warmup_steps": 2},
        "checkpoint": {"save_interval": 1, "keep": 3},
        "tracking": {"plot": False, "samples_per_step": 2},
    }
    return base_config(
        model,
        run_dir,
        **{name: {**given.get(name, {}), **sections.get(name, {})} for name in given | sections},
    )


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    launch(config_of(model, run_dir))
    return run_dir


def test_a_run_trains_both_models(run: Path, model: str) -> None:
    steps = [row for row in read_metrics(run) if row["step"]]
    assert len(steps) == 3 and all(row.keys() >= CRITIC for row in steps)
    assert steps[0]["critic/explained_variance"] == 0  # it begins with the value 0 everywhere
    assert steps[0]["critic/lr"] < steps[-1]["critic/lr"] == 1e-3
    assert len({row["critic/value"] for row in steps}) == 3
    assert [row["log_ratio/first_update"] for row in steps] == [0.0] * 3
    assert not torch.equal(
        *(files["model.norm.weight"] for files in (exported(run), load_file(weights_of(model))))
    )
    names = json.loads((run / "checkpoints" / "step_000003" / "state.json").read_text())["steps"]
    assert set(names) == {"optimizer", "schedule", "critic.optimizer", "critic.schedule"}


def weights_of(model: str) -> Path:
    return Path(model) / "model.safetensors"


def test_the_value_model_is_exported_for_transformers(run: Path) -> None:
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        run / "critic_hf", num_labels=1, pad_token_id=0, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.score.weight.shape[0] == 1 and loaded.score.weight.abs().max() > 0


def test_a_checkpoint_converts_to_the_policy(run: Path, model: str, tmp_path: Path) -> None:
    checkpoint = str(run / "checkpoints" / "step_000003")
    convert.main(["to-hf", checkpoint, str(tmp_path / "hf"), "--source", model, "--processes", "1"])
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported(run).items())


def test_a_resumed_run_ends_the_same(run: Path, model: str, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    for name in ("hf", "critic_hf", "checkpoints/step_000002", "checkpoints/step_000003"):
        shutil.rmtree(resumed / name)
    launch(config_of(model, resumed))
    assert first_difference(resumed, run) == ""
    critic, other = (
        load_file(next((folder / "critic_hf").glob("*.safetensors"))) for folder in (resumed, run)
    )
    assert all(torch.equal(critic[name], other[name]) for name in other)


def test_it_goes_on_in_another_layout(run: Path, model: str, tmp_path: Path) -> None:
    """The same weights and moments on two ranks, up to rounding."""
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    launch(
        config_of(
            model,
            resumed,
            parallel={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        ),
        2,
    )
    last, whole = (read_metrics(folder)[-1] for folder in (resumed, run))
    for name in ("critic/loss", "critic/value", "critic/grad_norm", "grad_norm"):
        assert last[name] == pytest.approx(whole[name], rel=1e-3), name


def test_the_value_model_can_begin_alone_and_have_other_sizes(model: str, tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path / "critic", TinyModel(hidden=16, layers=1, experts=2, expert_width=8), words=[WORD]
    )
    critic = {"path": str(tmp_path / "critic"), "warmup_steps": 2}
    launch(config_of(model, tmp_path / "run", critic=critic, checkpoint={"save_interval": 0}))
    steps = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["updates"] for row in steps] == [0, 0, 2]
    assert all("critic/loss" in row for row in steps)
    assert "grad_norm" not in steps[0] and steps[0]["entropy"] > 0
    assert load_file(next((tmp_path / "run/critic_hf").glob("*.safetensors")))[
        "score.weight"
    ].shape == (1, 16)
