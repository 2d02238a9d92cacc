"""A run of Qwen3-Next: gated delta nets in the trainer, in the engine and in the exported model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import base_config, exported, launch, records, tiny_model


@pytest.fixture
def model(tmp_path) -> str:
    """A random Qwen3-Next with the tokenizer of the other tests."""
    tokenizer = Path(tiny_model(tmp_path / "tokenizer"))
    words = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    folder = save_tiny_model(
        tmp_path / "model", "next", seed=24, initializer_range=0.1, vocab_size=words
    )
    for file in tokenizer.glob("token*.json"):
        (Path(folder) / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow  # tests/equivalence and tests/rollout/embedded have its parts
def test_engine_and_trainer_agree_and_every_weight_is_trained(model, tmp_path):
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    config = base_config(model, tmp_path / "run", parallel=layout, routing={"replay": "r2"})
    launch(config, 4)
    found = records(config["run_dir"])[1:]
    assert len(found) == 3 and max(line["mismatch/abs_diff_max"] for line in found) < 1e-4
    before = load_file(Path(model) / "model.safetensors")
    after = exported(config["run_dir"])
    assert before.keys() == after.keys()
    assert not [name for name in before if torch.equal(before[name], after[name])]
