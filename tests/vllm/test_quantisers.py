"""Our formats against vLLM's own quantisers and compressed-tensors, byte for byte, in its
interpreter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from megatron_gspo.models.packed_int4 import dequantized
from megatron_gspo.models.quantization.formats import FORMATS

SCRIPT = """
import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, scaled_quantize

found = {}
for number, weight in enumerate(torch.load(sys.argv[1])):
    for name, group in (("fp8_block", GroupShape(128, 128)), ("fp8_tensor", GroupShape(-1, -1))):
        found[name, number] = scaled_quantize(weight, group, torch.float8_e4m3fn, torch.float32)
    layer = torch.nn.Module()
    layer.w13_weight = layer.w2_weight = torch.nn.Parameter(weight.float()[None], requires_grad=False)
    layer.num_experts = layer.local_num_experts = 1
    Int8OnlineMoEMethod._quantize_weights(SimpleNamespace(moe=SimpleNamespace(tp_size=1)), layer)
    found["int8", number] = layer.w2_weight.data[0], layer.w2_scale.data[0]
torch.save(found, sys.argv[2])
"""


def test_bytes_are_those_of_vllm(vllm_python: str, tmp_path: Path) -> None:
    """Its integers in float32; where the weight is bfloat16, vLLM rounds their scales to
    bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(torch.randn(256, 384, generator=generator))
    weights = [
        (torch.randn(256, 384, generator=generator) * spread).bfloat16(),
        torch.randn(128, 128),
    ]
    torch.save(weights, tmp_path / "weights.pt")
    subprocess.run(
        [vllm_python, "-c", SCRIPT, tmp_path / "weights.pt", tmp_path / "found.pt"], check=True
    )
    quantised = torch.load(tmp_path / "found.pt")
    assert len(quantised) == 6
    for (name, number), (values, scales) in quantised.items():
        ours = FORMATS[name].quantize(weights[number])
        assert torch.equal(ours[0].view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(ours[1].flatten(), scales.flatten()), name


INT4_SCRIPT = """
import sys

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize

words, scales = torch.load(sys.argv[1])
integers = unpack_from_int32(words, 4, torch.Size((words.shape[0], 8 * words.shape[1])))
torch.save(dequantize(integers, scales), sys.argv[2])
"""


def test_int4_is_that_of_compressed_tensors(vllm_python: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (64, 32), generator=generator).int()
    scales = (torch.rand(64, 8, generator=generator) * 3).bfloat16()
    torch.save((words, scales), tmp_path / "packed.pt")
    arguments = [tmp_path / "packed.pt", tmp_path / "weights.pt"]
    subprocess.run([vllm_python, "-c", INT4_SCRIPT, *arguments], check=True)
    expected = torch.load(tmp_path / "weights.pt")
    assert expected.dtype == torch.bfloat16
    assert torch.equal(dequantized(words, scales), expected)
