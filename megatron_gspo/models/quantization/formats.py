"""Formats of eight bits: a weight [out, in] is values of one byte times float32 scales.

- ``fp8_block``: E4M3 with a scale for each block of 128 x 128, as DeepSeek-V3's and Qwen3's FP8
  checkpoints.
- ``fp8_tensor``: E4M3 with one scale.
- ``int8``: integers in [-127, 127] with a scale for each row.

Only weights are quantised here; servers compute with activations in eight bits too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = (128, 128)  # rows and columns that share a scale
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_INT8_MAX = 127
_SMALLEST = 1e-30  # magnitudes below it are 0: their scales would not be finite


@dataclass(frozen=True)
class Format:
    """How the weights of a format are stored."""

    name: str
    scale: str
    """What the name of a scale has after that of its weight."""

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Weight [out, in] -> (values [out, in] of one byte, scales float32)."""

    dequantize: Callable[[Tensor, Tensor], Tensor]
    """The inverse of `quantize`, float32."""


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [out, in] E4M3 and scales [blocks of rows, blocks of columns] float32: the largest
    magnitude of a block becomes 448. The last blocks may be smaller. Memory: two float32 copies of
    the weight."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK[1], 0, -rows % BLOCK[0]))
    blocks = padded.view(
        padded.shape[0] // BLOCK[0], BLOCK[0], padded.shape[1] // BLOCK[1], BLOCK[1]
    )
    factors, scales = _fp8_scales(blocks.abs().amax(dim=(1, 3)))
    values = _as_fp8(blocks * factors[:, None, :, None]).view(padded.shape)
    return values[:rows, :columns].contiguous(), scales


def dequantize_blocks(
    values: Tensor,
    scales: Tensor,
    *,
    firsts: tuple[int, int] = (0, 0),
    block: tuple[int, int] = BLOCK,
) -> Tensor:
    """``values`` [n, m] times the scale of each one's block, float32.

    ``scales`` [blocks of rows, blocks of columns] of a whole tensor, in which the values begin at
    ``firsts``.
    """
    rows, columns = (
        torch.arange(first, first + size, device=scales.device) // length
        for first, size, length in zip(firsts, values.shape, block, strict=True)
    )
    return values.float() * scales.float()[rows][:, columns]


def quantize_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [out, in] E4M3 and one scale [1] float32: the largest magnitude becomes 448."""
    values = weight.float()
    factors, scales = _fp8_scales(values.abs().amax().view(1))
    return _as_fp8(values * factors), scales


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [out, in] int8 and scales [out, 1] float32: the largest magnitude of a row becomes
    127.
    """
    values = weight.float()
    largest = values.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > _SMALLEST, largest / _INT8_MAX, 1.0)
    return (values / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scales


def _dequantize(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales


def _fp8_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """(what weights are multiplied by, its inverse) for these largest magnitudes."""
    usable = largest > _SMALLEST
    factors = torch.where(usable, _FP8_MAX / torch.where(usable, largest, 1.0), 1.0)
    return factors, 1.0 / factors


def _as_fp8(values: Tensor) -> Tensor:
    return values.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


FORMATS = {
    "fp8_block": Format("fp8_block", "_scale_inv", quantize_blocks, dequantize_blocks),
    "fp8_tensor": Format("fp8_tensor", "_scale", quantize_tensor, _dequantize),
    "int8": Format("int8", "_scale", quantize_rows, _dequantize),
}
