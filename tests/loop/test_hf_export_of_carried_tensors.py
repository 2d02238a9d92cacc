"""A run's exported model has the tensors of its source that are not trained, and the routers'
biases in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.loop.hf_export import export
from megatron_gspo.models.hf_checkpoint import SINGLE, CheckpointReader
from tests.support.distributed import run_distributed
from tests.support.routing_cases import policy_of
from tests.support.tiny_models import save_tiny_model


def write(rank: int, world_size: int, path: str, folder: str) -> None:
    export(policy_of(path, dtype="bfloat16"), Path(folder))


def test_multi_token_prediction_is_exported_as_it_was(tmp_path):
    path = save_tiny_model(tmp_path / "model", "deepseek", dtype=torch.bfloat16)
    extra = {
        "model.layers.4.enorm.weight": torch.randn(32).bfloat16(),
        "model.layers.4.bias": torch.randn(3),
    }
    expected = load_file(Path(path) / SINGLE) | extra
    save_file(expected, Path(path) / SINGLE, metadata={"format": "pt"})
    run_distributed(write, 1, path, str(tmp_path / "out"))
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.names == set(expected)
        for name, value in expected.items():
            exported = reader.read(name)
            assert exported.dtype == value.dtype and torch.equal(exported, value), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
