"""Values of fake device tensors that are known, as real tensors on the host.

Shapes of a step depend on a few integers that are on the device: tokens per expert, lengths,
positions. They come from the host or from constants, and each operation on them is repeated on the
host copies, so that ``.tolist()`` and split sizes are computed by the program's own code. Views of
a known tensor share its copy, as on the device. Values that depend on weights are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result

_MOST_INTEGERS = 2**27
_MOST_FLOATS = 2**24  # routes of 32k tokens to 512 experts
_MOST_COLUMNS = 1024  # of a float matrix: the experts of a routing map

aten = torch.ops.aten
_CONSTANTS = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
_OVERWRITES = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    """The tensors of an operation's arguments or results: `tree_leaves` for the few kinds that
    operations have.
    """
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


class _Known:
    """A host copy; ``alive`` is shared by all views of its memory and is true while the copy is
    right.
    """

    __slots__ = ("alive", "value")

    def __init__(self, value: Tensor, alive: list[bool] | None = None) -> None:
        self.value = value
        self.alive = [True] if alive is None else alive


class KnownValues:
    """The host copies are attributes of the fake tensors and end with them."""

    def get(self, tensor: Tensor) -> Tensor | None:
        """A tensor's values: its host copy, which may be written to; a host tensor itself; None
        if unknown.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor
        known = getattr(tensor, "_rehearsal_known", None)
        return known.value if known is not None and known.alive[0] else None

    def is_on_device(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Give a new fake tensor a host copy, if it is of a kind that decides shapes."""
        if isinstance(tensor, FakeTensor) and _is_small(tensor):
            tensor._rehearsal_known = _Known(value)  # type: ignore[attr-defined]

    def put(self, tensor: Tensor, value: Tensor | None) -> None:
        """Write into a tensor, in place; None makes it unknown."""
        if not isinstance(tensor, FakeTensor):
            if value is not None:
                tensor.copy_(value.reshape(tensor.shape))
            return
        if value is None:
            self.forget(tensor)
            return
        known = self.get(tensor)
        if known is None:
            self.set(tensor, value.clone().reshape(tensor.shape))
        else:
            known.copy_(value.reshape(known.shape))

    def forget(self, tensor: Tensor) -> None:
        """A tensor and its views were overwritten with unknown values."""
        known = getattr(tensor, "_rehearsal_known", None)
        if known is not None:
            known.alive[0] = False

    def follow(self, func: Operation, args: Args, kwargs: Kwargs, out: Result) -> str:
        """Repeat on the host what an operation did on the device.

        Returns why a known value was lost, or nothing.
        """
        outputs = [leaf for leaf in tensors_in((out,)) if isinstance(leaf, FakeTensor)]
        if func in _CONSTANTS or func in _EMPTY:
            for leaf in outputs:
                if _is_small(leaf) and (func in _CONSTANTS or not leaf.dtype.is_floating_point):
                    self.set(
                        leaf, torch.full(leaf.shape, _CONSTANTS.get(func, 0), dtype=leaf.dtype)
                    )
            return ""
        if not any(map(_is_small, outputs)):
            self._forget_written(func, args, kwargs)
            return ""
        if func in _OVERWRITES and args[0].is_contiguous() and self.get(args[0]) is None:
            self._revive(args[0])
        inputs = tensors_in((*args, *kwargs.values()))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(self.get(leaf) is None for leaf in inputs):
            self._forget_written(func, args, kwargs)
            return ""
        return self._repeat(func, args, kwargs, inputs, out)

    def _repeat(
        self, func: Operation, args: Args, kwargs: Kwargs, inputs: list[Tensor], out: Result
    ) -> str:
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            real = func(*tree_map(self._on_host, args), **tree_map(self._on_host, kwargs))
        except (RuntimeError, IndexError, NotImplementedError) as error:
            self._forget_written(func, args, kwargs)
            return f"{func}: {type(error).__name__} {str(error).splitlines()[0]}"
        alive = {
            leaf._rehearsal_known.value.untyped_storage()._cdata: leaf._rehearsal_known.alive  # type: ignore[attr-defined]
            for leaf in inputs
            if isinstance(leaf, FakeTensor)
        }
        for fake, value in zip(tensors_in((out,)), tensors_in((real,)), strict=True):
            if isinstance(fake, FakeTensor) and _is_small(fake):
                fake._rehearsal_known = _Known(  # type: ignore[attr-defined]
                    value, alive.get(value.untyped_storage()._cdata)
                )
        return ""

    def _on_host(self, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return self.get(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _revive(self, tensor: Tensor) -> None:
        """A tensor that is wholly overwritten gets a copy to be written to."""
        if isinstance(tensor, FakeTensor) and _is_small(tensor):
            tensor._rehearsal_known = _Known(torch.zeros(tensor.shape, dtype=tensor.dtype))  # type: ignore[attr-defined]

    def _forget_written(self, func: Operation, args: Args, kwargs: Kwargs) -> None:
        if not func._schema.is_mutable:
            return
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[i] if i < len(args) else kwargs.get(argument.name)
                for leaf in tensors_in((written,)):
                    self.forget(leaf)


def _is_small(tensor: Tensor) -> bool:
    if not tensor.dtype.is_floating_point:
        return tensor.numel() <= _MOST_INTEGERS
    if tensor.requires_grad:
        return False
    return tensor.dim() == 0 or (
        tensor.dim() == 2 and tensor.shape[1] <= _MOST_COLUMNS and tensor.numel() <= _MOST_FLOATS
    )
