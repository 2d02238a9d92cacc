"""Our formats against SGLang's own functions, in its interpreter: bytes of one scale, values of
blocks.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from megatron_gspo.config import ServerConfig
from megatron_gspo.models.quantization.formats import FORMATS, dequantize_blocks, quantize_blocks
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch

SCRIPT = """
import sys

import torch
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, input_to_float8

weights, blocks = torch.load(sys.argv[1])
found = [input_to_float8(weight, torch.float8_e4m3fn) for weight in weights]
whole = [block_quant_dequant(values, scales, [128, 128], torch.float32) for values, scales in blocks]
torch.save((found, whole), sys.argv[2])
"""


def test_bytes_and_values_are_those_of_sglang(sglang_python: str, tmp_path: Path) -> None:
    weights = [torch.randn(576, 200).bfloat16(), torch.randn(256, 384)]
    blocks = [quantize_blocks(weight) for weight in weights]
    torch.save((weights, blocks), tmp_path / "weights.pt")
    servers = ServerConfig(num_servers=1, python=sglang_python, server_args=("--device", "cpu"))
    subprocess.run(
        [sglang_python, "-c", SCRIPT, tmp_path / "weights.pt", tmp_path / "found.pt"],
        check=True,
        env=SGLangLaunch(servers, "no model").environment(0),
    )
    quantised, whole = torch.load(tmp_path / "found.pt")
    for weight, (values, scales) in zip(weights, quantised, strict=True):
        ours = FORMATS["fp8_tensor"].quantize(weight)
        assert torch.equal(ours[0].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(ours[1], scales.view(1))
    for each, exact in zip(blocks, whole, strict=True):
        assert torch.equal(dequantize_blocks(*each), exact)
