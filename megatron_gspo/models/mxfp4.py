"""MXFP4 (Open Compute Project, Microscaling Formats 1.0, sections 5.3.3 and 6.3): blocks of 32
numbers of 4 bits, E2M1, with a power of two for each block."""

from __future__ import annotations

import torch
from torch import Tensor

# Ends of the names of the two tensors that a quantised one is stored as.
BLOCKS = "_blocks"
SCALES = "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the scales' exponents


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """``blocks`` [..., n, 16] uint8, two numbers in a byte, the low half first; ``scales`` [..., n]
    uint8, exponents of two. bfloat16 [..., 32 n], exact."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[pairs.int()]
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).bfloat16().flatten(-2)
