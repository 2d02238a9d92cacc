"""What a block of code allocates, holds at most and leaves alive, held by Python or by a graph
in C++.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Follows every storage that an operator makes inside the block, in forward and backward, until
    it is freed.

    allocated: bytes of all storages. peak: the most bytes alive at once.

    By storages and not by the allocator's records: a gloo thread may be the last to let go of a
    tensor, and torch's profiler sees the allocations and frees of its own threads only. Working
    memory inside of an operation isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0
        self.peak = 0
        self._alive_bytes = 0
        self._known: dict[int, tuple[Any, int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            _address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and _address(leaf) not in inputs
                and _address(leaf) not in self._known
            ):
                name = f"{func.overloadpacket.__name__} {list(leaf.shape)} {leaf.dtype}"
                self._follow(leaf.untyped_storage(), name)
        return out

    def _follow(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage._cdata
        size = storage.nbytes()

        def freed(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self._alive_bytes -= size

        self._known[key] = (weakref.ref(storage, freed), size, name)
        self.allocated += size
        self._alive_bytes += size
        self.peak = max(self.peak, self._alive_bytes)

    def alive(self) -> list[tuple[int, str]]:
        """Bytes and description of each storage that still lives, the largest first."""
        gc.collect()
        return sorted(((size, name) for _, size, name in self._known.values()), reverse=True)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
