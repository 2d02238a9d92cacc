"""A small config that works, as data and as a file, and the model directory that it names."""

import json
from pathlib import Path

import pytest
import yaml

HF_CONFIG = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def hf_config() -> dict:
    return dict(HF_CONFIG)


@pytest.fixture
def plain(tmp_path: Path) -> dict:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model), "init": "random"},
        "data": {"task": {"name": "chain_sum"}, "max_prompt_length": 32},
        "rollout": {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "max_response_length": 64},
        "training": {"steps": 3, "global_batch_size": 32, "max_tokens_per_micro_batch": 1024},
    }


@pytest.fixture
def file(tmp_path: Path, plain: dict) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path
