"""Tensors that Megatron's buffers hold at equal distances, as one tensor without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Equidistant:
    """``tensor`` [n, ...]: n tensors as they lie in memory. reverse: the last of them is first, as
    parameters are in Megatron's buffers.
    """

    tensor: Tensor
    reverse: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Equidistant | None:
        """None where the tensors are not of one shape, dense, and at equal distances in one
        memory, as with the padding between two buckets.
        """
        first = tensors[0]
        memory = first.untyped_storage()._cdata
        offsets = [int(tensor.storage_offset()) for tensor in tensors]
        step = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
        if abs(step) < first.numel():
            return None
        for i, tensor in enumerate(tensors):
            if (
                tensor.shape != first.shape
                or tensor.dtype != first.dtype
                or not tensor.is_contiguous()
                or tensor.untyped_storage()._cdata != memory
                or offsets[i] != offsets[0] + i * step
            ):
                return None
        size = (len(tensors), *first.shape)
        stride = (abs(step), *first.stride())
        return cls(first.as_strided(size, stride, min(offsets)), step < 0)
