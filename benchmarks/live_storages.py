"""Bytes held by tensors that code on this rank creates, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Address and size of each distinct storage."""
    found = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


class LiveStorages(TorchDispatchMode):
    """Within the context every storage that an operation makes, in forward and backward, is counted until it is freed.

    By storages and not by the allocator's records: a gloo thread may be the last to let go of a tensor, and torch's
    profiler sees the allocations and frees of its own threads only. Working memory inside of an operation isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.at = ""  # the operation at the peak
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), inputs, func)
        return out

    def _note(self, storage: torch.UntypedStorage, inputs: set[int], func: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in inputs or key in self._known:
            return  # a view, or an operation in place

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.alive -= size

        self._known[key] = weakref.ref(storage, gone)
        self.alive += size
        if self.alive > self.peak:
            self.peak, self.at = self.alive, str(func)
