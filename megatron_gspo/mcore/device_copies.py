"""Copies from the host to the device that the host doesn't wait for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a multiple of every element size


def copy_to_device(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Contiguous copies of host ``tensors`` on ``device``, made by a single transfer; int64 arrives as int32.

    The tensors are laid one behind the other in pinned memory, which torch frees once the transfer has ended. The
    results are views of one buffer. Values of int64 must fit in int32.
    """
    device = torch.device(device)
    narrow = {name: value.int() if value.dtype == torch.int64 else value for name, value in tensors.items()}
    ends = list(accumulate(-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in narrow.values()))
    starts = dict(zip(narrow, [0, *ends], strict=False))
    staging = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def place(buffer: Tensor, name: str) -> Tensor:
        value, start = narrow[name], starts[name]
        return buffer[start : start + value.nbytes].view(value.dtype).view(value.shape)

    for name, value in narrow.items():
        place(staging, name).copy_(value)
    moved = staging.to(device, non_blocking=True)
    return {name: place(moved, name) for name in narrow}
