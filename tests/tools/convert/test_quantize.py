"""`convert quantize`: what it writes, and what it refuses before it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_gspo.errors import InputError
from megatron_gspo.models.hf_checkpoint import SINGLE, CheckpointReader
from megatron_gspo.models.quantization.formats import FORMATS
from megatron_gspo.tools.convert.__main__ import main
from megatron_gspo.tools.convert.quantize import quantize_checkpoint
from tests.support.tiny_models import save_tiny_model

MODULES = [
    "model.layers.*.self_attn.*",
    "model.layers.*.mlp.*",
    "model.layers.*.mlp.experts.*.*",
    "model.layers.*.mlp.shared_experts.*",
]
EXCLUDE = ["lm_head", "model.layers.*.mlp.gate"]


@pytest.mark.parametrize("name", FORMATS)
def test_files_hold_values_and_scales_of_every_listed_weight(tmp_path: Path, name: str) -> None:
    """Of a DeepSeek-V3, whose router's bias stays float32; the other tensors stay bfloat16."""
    source = save_tiny_model(tmp_path / "model", "deepseek", dtype=torch.bfloat16)
    out = tmp_path / "out"
    main(
        [
            "quantize",
            source,
            str(out),
            "--format",
            name,
            "--modules",
            *MODULES,
            "--exclude",
            *EXCLUDE,
        ]
    )
    tensors = load_file(out / SINGLE)
    each = FORMATS[name]
    with CheckpointReader(source) as reader:
        for weight in reader.names:
            exact = reader.read(weight)
            if "proj" not in weight:
                assert (
                    torch.equal(tensors.pop(weight), exact) and weight + each.scale not in tensors
                )
                continue
            values, scales = each.quantize(exact)
            assert torch.equal(tensors.pop(weight).view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(tensors.pop(weight + each.scale), scales)
    assert not tensors
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    method = "fp8" if name == "fp8_block" else "compressed-tensors"
    assert config["quantization_config"]["quant_method"] == method


def test_what_is_refused(tmp_path: Path) -> None:
    source = Path(save_tiny_model(tmp_path / "model"))
    out = tmp_path / "out"
    with pytest.raises(InputError, match="--modules lm_heads: matches no linear module"):
        quantize_checkpoint(source, out, "int8", ["lm_heads"], [])
    with pytest.raises(InputError, match="exists; remove it or choose another output"):
        quantize_checkpoint(source, source, "int8", ["lm_head"], [])
    assert not out.exists() and not out.with_name("out.partial").exists()
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(source), str(out), "--format", "none"])
    assert ended.value.code == 2
