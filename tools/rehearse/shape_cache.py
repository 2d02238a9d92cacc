"""The shapes of results, remembered by operation and arguments: torch's fake tensors compute each
of them once.

A step runs the same operations for every layer and micro-batch. Torch's own cache takes most of a
rehearsal's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result

_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_SLICE = torch.ops.aten.slice.Tensor
# Views whose place in memory is not that of their argument plus a constant.
_PLACES = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.view.dtype,
        torch.ops.aten.view_as_real.default,
        torch.ops.aten.view_as_complex.default,
    }
)
# The result depends on values, or the operation gives its argument another shape.
_UNCACHED_TAGS = frozenset(
    {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
)


@dataclass(frozen=True)
class _Spec:
    """One tensor of a result. argument: the position, among the tensors of the arguments, of the
    one that the result is (``is_view`` False) or is a view of; None for new memory. offset: from
    the place of that argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    argument: int | None
    is_view: bool


class ShapeCache:
    """Calls ``mode`` for what is new."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entries: dict[Hashable, tuple[Result]] = {}
        self._uncached: dict[Operation, bool] = {}

    def run(self, func: Operation, args: Args, kwargs: Kwargs) -> Result:
        """The result of ``func`` in shapes; raises what ``mode`` raises."""
        if func is _SLICE and not kwargs:
            return self._make(_slice(*args), [args[0]])
        tensors: list[Tensor] = []
        sizes = None if self._is_uncached(func) else _key_of((args, tuple(kwargs.items())), tensors)
        if sizes is None:
            return self._mode.dispatch(func, (), args, kwargs)
        places = tuple(map(_place, tensors)) if func in _PLACES else ()
        key = func, sizes, places, _shared_memory(tensors)
        entry = self._entries.get(key)
        if entry is None:
            out = self._mode.dispatch(func, (), args, kwargs)
            self._entries[key] = (_mapped(out, lambda leaf: _spec(leaf, tensors)),)
            return out
        return _mapped(entry[0], lambda spec: self._make(spec, tensors))

    def _is_uncached(self, func: Operation) -> bool:
        known = self._uncached.get(func)
        if known is None:
            known = not _UNCACHED_TAGS.isdisjoint(func.tags)
            self._uncached[func] = known
        return known

    def _make(self, spec: Any, tensors: list[Tensor]) -> Any:
        if not isinstance(spec, _Spec):
            return spec
        if spec.argument is not None and not spec.is_view:
            return tensors[spec.argument]
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        if spec.argument is not None:
            viewed = tensors[spec.argument]
            offset = _place(viewed) + spec.offset
            with in_kernel_invocation_manager(self._mode):
                made.set_(viewed.untyped_storage(), offset, spec.shape, spec.stride)
        return FakeTensor(self._mode, made, spec.device)


def _key_of(value: object, tensors: list[Tensor]) -> Hashable:
    """What decides the shapes of a result, or None where a value is of another kind; fills
    ``tensors``.
    """
    if isinstance(value, FakeTensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, (tuple, list)):
        keys = []
        for item in value:
            key = _key_of(item, tensors)
            if key is None:
                return None
            keys.append(key)
        return tuple(keys)
    return (type(value), value) if isinstance(value, _PLAIN) else None


def _place(tensor: Tensor) -> int:
    """The offset of a tensor in its memory, in elements."""
    return int(tensor.storage_offset())


def _slice(
    tensor: FakeTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Spec:
    """The shape of a slice: a model's buffers are cut at a different place for each parameter."""
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    shape, stride = list(tensor.shape), list(tensor.stride())
    shape[dim] = -(-max(stop - first, 0) // step)
    offset = first * stride[dim]
    stride[dim] *= step
    place = torch.Size(shape), tuple(stride), offset
    return _Spec(*place, tensor.dtype, tensor.fake_device, argument=0, is_view=True)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A result with each of its leaves changed."""
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _shared_memory(tensors: list[Tensor]) -> tuple[int, ...]:
    """For each tensor the first one that has the same storage."""
    if len(tensors) < 2:
        return ()
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return tuple(map(storages.index, storages))


def _spec(leaf: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    storage = leaf.untyped_storage()._cdata
    same = [i for i, tensor in enumerate(tensors) if tensor is leaf]
    shared = same or [
        i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage
    ]
    argument = shared[0] if shared else None
    return _Spec(
        leaf.shape,
        leaf.stride(),
        _place(leaf) - (0 if argument is None else _place(tensors[argument])),
        leaf.dtype,
        leaf.fake_device,
        argument,
        is_view=not same,
    )
