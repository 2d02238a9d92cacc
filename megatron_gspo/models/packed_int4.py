"""INT4 of compressed-tensors, ``pack-quantized``: eight integers from -8 to 7 in a word of 32 bits,
the first in its lowest bits, and a scale for each group of consecutive columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Ends of the names of the tensors that a quantised one is stored as; the last has its sizes.
PACKED = "_packed"
SCALE = "_scale"
SHAPE = "_shape"
PER_WORD = 8
_BITS = 4
_OFFSET = 8


def dequantized(words: Tensor, scales: Tensor) -> Tensor:
    """``words`` [rows, columns / 8] int32, ``scales`` [rows, groups]. bfloat16 [rows, columns]:
    each product is rounded once."""
    shifts = torch.arange(0, PER_WORD * _BITS, _BITS, dtype=torch.int32)
    values = (((words[..., None] >> shifts) & 0xF) - _OFFSET).flatten(-2)
    group = values.shape[-1] // scales.shape[-1]
    return (values * scales.float().repeat_interleave(group, dim=-1)).bfloat16()


def group_size(settings: Mapping[str, Any]) -> int | None:
    """The columns that share a scale by the ``quantization_config`` of a config.json; None where it
    is of another format."""
    groups = settings.get("config_groups")
    if settings.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return None
    sizes = {_group_size(group) for group in groups.values()}
    return sizes.pop() if len(sizes) == 1 else None


def _group_size(group: object) -> int | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    known = {"num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group"}
    if any(weights.get(key) != value for key, value in known.items()) or weights.get("actorder"):
        return None
    size = weights.get("group_size")
    return size if type(size) is int and size > 0 and size % PER_WORD == 0 else None
