"""A run of Qwen3.5: the language model is trained, in a model directory with a vision tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import base_config, exported, launch, records, tiny_model


def save_model(folder: Path, kind: str, tokenizer: Path) -> str:
    """A random model with the tokenizer of the other tests."""
    vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    save_tiny_model(folder, kind, seed=24, initializer_range=0.1, vocab_size=vocab_size)
    for file in tokenizer.glob("token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.mark.slow  # tests/equivalence and tests/rollout/embedded have its parts
@pytest.mark.parametrize("kind", ["qwen35_moe", "qwen35"])
def test_engine_and_trainer_agree_and_the_language_model_alone_is_trained(kind, tmp_path):
    tokenizer = Path(tiny_model(tmp_path / "tokenizer"))
    folder = Path(save_model(tmp_path / "model", kind, tokenizer))
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 1}
    routing = {"replay": "r2"} if "moe" in kind else {}
    config = base_config(str(folder), tmp_path / "run", parallel=layout, routing=routing)
    launch(config, 2)
    steps = records(config["run_dir"])[1:]
    assert len(steps) == 3 and max(row["mismatch/abs_diff_max"] for row in steps) < 1e-4
    before = load_file(folder / "model.safetensors")
    after = exported(config["run_dir"])
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("model.visual.")}
