"""Copies between the host and the device that the host doesn't wait for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a multiple of every element size


def copy_to_device(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Contiguous copies of host ``tensors`` on ``device``, made by a single transfer; int64 arrives
    as int32.

    The tensors are laid one behind the other in pinned memory, which torch frees once the transfer
    has ended. The results are views of one buffer. Values of int64 must fit in int32.
    """
    device = torch.device(device)
    dtypes = {
        name: torch.int32 if value.dtype == torch.int64 else value.dtype
        for name, value in tensors.items()
    }
    sizes = {name: value.numel() * dtypes[name].itemsize for name, value in tensors.items()}
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()))
    starts = dict(zip(tensors, [0, *ends], strict=False))
    staging = torch.empty(
        ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=device.type == "cuda"
    )

    def view_of(buffer: Tensor, name: str) -> Tensor:
        start = starts[name]
        return buffer[start : start + sizes[name]].view(dtypes[name]).view(tensors[name].shape)

    for name, value in tensors.items():
        view_of(staging, name).copy_(value)  # converts on the way
    moved = staging.to(device, non_blocking=True)
    return {name: view_of(moved, name) for name in tensors}


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, or the tensor itself if it is on the host. Synchronise before the
    host reads it; operations of the same stream may read it at once.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
