"""gpt-oss in MXFP4 to Megatron and back: bfloat16 without quantization, bit for bit the
dequantised source.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import (
    checkpoint_metadata,
    write_metadata_files,
)
from megatron_gspo.models import ModelError, family_of, read_config
from megatron_gspo.models.hf_checkpoint import SINGLE
from megatron_gspo.tools.convert.to_hugging_face import to_hugging_face
from megatron_gspo.tools.convert.to_megatron import to_megatron
from megatron_gspo.tools.convert.verify import verify
from megatron_gspo.tools.convert.work_units import Workers
from tests.support.configs import parallel
from tests.support.tiny_models import save_mxfp4_model, stored_tensors

LAYOUTS = [ParallelConfig(), parallel(tensor=2, expert=2, expert_tensor=2, pipeline=2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return Path(save_mxfp4_model(tmp_path_factory.mktemp("models") / "mxfp4"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tp2 pp2 ep2 etp2"])
def test_there_and_back(source, layout, tmp_path):
    family, shape = family_of(read_config(source))
    metadata = checkpoint_metadata(family, shape, layout)
    megatron = to_megatron(
        source, tmp_path / "megatron", metadata.chunks, metadata.objects, write_metadata_files
    )
    # As a reader of any layout has it.
    metadata = checkpoint_metadata(family, shape, ParallelConfig())
    count = verify(source, megatron, metadata.chunks, dtype=torch.bfloat16)
    assert count == sum(8 if ".experts." in name else 1 for name in stored_tensors(source))
    few = Workers(unit_bytes=1 << 14)  # slices of a tensor in several units
    back = to_hugging_face(
        megatron, tmp_path / "back", metadata.chunks, source, workers=few, max_shard_bytes=1 << 20
    )
    restored = load_file(back / SINGLE)
    truth = stored_tensors(source)
    assert restored.keys() == truth.keys()
    assert all(
        restored[name].dtype == torch.bfloat16 and torch.equal(restored[name], truth[name])
        for name in truth
    )
    config = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert verify(back, megatron, metadata.chunks, dtype=torch.bfloat16) == count


def test_another_number_of_experts_is_refused(source, tmp_path):
    """The first eight of nine would be read without a word."""
    tensors = stored_tensors(source)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    metadata = checkpoint_metadata(*family_of(read_config(source)), ParallelConfig())
    with pytest.raises(ModelError, match="has 9 experts in the checkpoint; config.json has 8"):
        to_megatron(
            tmp_path, tmp_path / "out", metadata.chunks, metadata.objects, write_metadata_files
        )
