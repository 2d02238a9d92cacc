"""A run of Qwen3.5: the language model is trained, in a model directory with a vision tower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training_runs import base_config, exported, launch, records, tiny_model
from tests.train.test_family_routes import save_model


@pytest.mark.slow  # tests/equivalence and tests/rollout/embedded have its parts
@pytest.mark.parametrize("kind", ["qwen35_moe", "qwen35"])
def test_engine_and_trainer_agree_and_the_language_model_alone_is_trained(kind, tmp_path):
    tokenizer = Path(tiny_model(tmp_path / "tokenizer"))
    folder = Path(save_model(tmp_path / "model", kind, tokenizer))
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 1}
    routing = {"replay": "r2"} if "moe" in kind else {}
    config = base_config(str(folder), tmp_path / "run", parallel=layout, routing=routing)
    launch(config, 2)
    rows = records(config["run_dir"])[1:]
    assert len(rows) == 3 and max(row["mismatch/abs_diff_max"] for row in rows) < 1e-4
    before = load_file(folder / "model.safetensors")
    after = exported(config["run_dir"])
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("model.visual.")}
