"""What a run prints of itself at its start and at its end, from whole runs as a user starts
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_gspo.config import Config
from megatron_gspo.loop.checkpoints import LoopState
from megatron_gspo.loop.run_lines import end_lines
from tests.support.training_runs import base_config, launch, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("lines") / "model")


def test_a_run_says_what_it_trains_and_where_its_results_are(model, tmp_path):
    run_dir = tmp_path / "run"
    log = launch(
        base_config(model, run_dir, training={"steps": 1}, evaluation={"n_samples": 1})
    ).log
    lines = log.splitlines()
    first = next(line for line in lines if line.startswith("gspo trains "))
    weights = load_file(Path(model) / "model.safetensors")
    count = sum(tensor.numel() for tensor in weights.values())
    assert f"{model} (qwen3_moe, {count:,} parameters, float32)" in first
    assert "prompts of spell_backward, rewards by " in first and "; 8 held-out prompts" in first
    assert "1 step of 4 prompts x 4 responses, 8 a mini-batch; 1 process, embedded engine" in lines
    assert any(line.startswith(f"output in {run_dir}, without checkpoints") for line in lines)
    assert any(
        line.startswith("trained 1 step in 0:") and "held-out accuracy" in line for line in lines
    )
    results = next(line for line in lines if line.startswith(f"results in {run_dir}: "))
    assert "metrics.jsonl" in results
    assert "hf (trained model" in results
    assert "checkpoints" not in results
    assert any(
        line.startswith("evaluate it with: ") and line.endswith(f"evaluate {run_dir}")
        for line in lines
    )


def config_of(tmp_path: Path, **sections: object) -> Config:
    return Config.from_dict(base_config("model", tmp_path / "run", **sections))


def test_without_weights_the_end_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    config = config_of(tmp_path, checkpoint={"export_hf": False})
    lines = end_lines(config, LoopState(step=3, wall_seconds=61.0), held_out=0)
    assert lines[0] == "trained 3 steps in 1:01"
    assert lines[-1].startswith("the trained weights were not kept")


def test_without_held_out_prompts_the_evaluation_needs_tasks(tmp_path):
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "config.json").write_text(json.dumps({}))
    lines = end_lines(config_of(tmp_path), LoopState(step=3), held_out=0)
    assert lines[-1].endswith(f"evaluate {tmp_path / 'run'} --tasks FILE")
