"""MXFP4 by hand, and against Transformers' own conversion."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_gspo.models.mxfp4 import dequantized


def test_values_by_hand():
    """Byte 0x1a: the low half first, 0b1010 = -1.0, then 0b0001 = 0.5; the block is multiplied
    by 2 ** (128 - 127).
    """
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 15] = 0x1A, 0x7F
    values = dequantized(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert values.shape == (1, 32) and values.dtype == torch.bfloat16
    assert values[0, [0, 1, 2, 30, 31]].tolist() == [-2.0, 1.0, 0.0, -12.0, 12.0]


def test_all_bytes_are_those_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16).repeat(2, 1, 1, 1)
    scales = torch.arange(100, 132, dtype=torch.uint8).view(2, 4, 4)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(dequantized(blocks, scales), expected)
