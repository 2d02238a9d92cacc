"""What a block of code allocates and leaves alive, held by Python or by a graph in C++."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Follows every storage that an operator allocates inside the block by a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _address(leaf) not in before and _address(leaf) not in self._seen:
                storage = leaf.untyped_storage()
                name = f"{func.overloadpacket.__name__} {list(leaf.shape)} {leaf.dtype}"
                self._seen[_address(leaf)] = (StorageWeakRef(storage), storage.nbytes(), name)
        return out

    def alive(self) -> list[tuple[int, str]]:
        """Bytes and description of each storage that still lives, the largest first."""
        gc.collect()
        found = [(size, name) for reference, size, name in self._seen.values() if not reference.expired()]
        return sorted(found, reverse=True)

    @property
    def allocated(self) -> int:
        """Bytes of all storages that were allocated."""
        return sum(size for _, size, _ in self._seen.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
