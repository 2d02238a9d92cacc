"""Training with adapters as a whole run: what it writes, exact resume, and that PEFT merges
them to what it exports.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_gspo.models.peft_files import read_adapters
from megatron_gspo.tracking import read_metrics
from tests.fault_injection.bitwise_diff import first_difference
from tests.support.training_runs import base_config, exported, launch, tiny_model
from tests.support.transformers_reference import checkpoint_tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model: str, run_dir: Path) -> dict[str, Any]:
    return base_config(
        model,
        run_dir,
        algorithm={"name": "grpo", "kl_loss_coef": 0.05},
        lora={"rank": 2, "alpha": 8.0},
        optimizer={"lr": 2e-2},
        parallel={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        checkpoint={"save_interval": 1, "keep": 3},
    )


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two processes, TP 2 and EP 2, with a reference policy."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    launch(config_of(model, run_dir), 2)
    return run_dir


def test_engine_and_reference_have_the_right_weights(run: Path) -> None:
    """The embedded engine has the merged ones: its log-probs are those of the trained model in
    every step. The reference is the start: the KL is 0 up to the first update and not after."""
    steps = [row for row in read_metrics(run) if row["step"]]
    assert len(steps) == 3 and all(row["mismatch/abs_diff_max"] < 1e-4 for row in steps)
    assert all(row["grad_norm"] > 0 for row in steps)
    assert 1e-6 < steps[0]["kl/ref"] < steps[-1]["kl/ref"]


def test_adapters_and_merged_weights_are_exported(run: Path, model: str) -> None:
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = checkpoint_tensors(start, lambda tensor: tensor.detach().clone())
    merged = checkpoint_tensors(
        PeftModel.from_pretrained(start, str(run / "adapters")).merge_and_unload(),
        torch.Tensor.detach,
    )
    trained = exported(run)
    adapters, facts = read_adapters(run / "adapters")
    changed = {name.replace(".lora_A", "") for name in adapters if ".lora_A." in name}
    assert len(changed) == 2 * (4 + 4 * 3) and facts.rank == 2 and facts.alpha == 8.0
    for name, tensor in trained.items():
        # A product's last bits.
        assert torch.allclose(tensor, merged[name], rtol=0, atol=5e-7), name
        assert torch.equal(tensor, base[name]) == (name not in changed), name


def test_checkpoints_name_their_base(run: Path) -> None:
    state = json.loads((run / "checkpoints" / "step_000003" / "state.json").read_text())
    assert len(state["base"]) == 16 and state["base"] == read_adapters(run / "adapters")[1].checksum


def test_a_resumed_run_ends_the_same(run: Path, model: str, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    for name in ("hf", "adapters", "checkpoints/step_000002", "checkpoints/step_000003"):
        shutil.rmtree(resumed / name)
    assert "resumed from" in launch(config_of(model, resumed), 2).log
    assert first_difference(resumed, run) == ""
    adapters, other = (
        load_file(folder / "adapters" / "adapter_model.safetensors") for folder in (resumed, run)
    )
    assert adapters.keys() == other.keys()
    assert all(torch.equal(adapters[name], other[name]) for name in other)
