"""A fake GPU of one rank: every operation on device tensors is computed in shapes only, and
recorded.

Host tensors are real. Device tensors are fake: they have a shape, a dtype and a device, but no
memory. What a kernel would have to compute on the GPU is unknown, except for the small integers
that `known_values` follows; what the host reads of them it gets, and each such read is recorded. An
operation whose result is unknown is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from megatron_gspo.tools.rehearse.fake_device.cuda_api import mark_pinned
from megatron_gspo.tools.rehearse.known_values import tensors_in
from megatron_gspo.tools.rehearse.op_rules import PRODUCTS, RULES, uses_host_indices
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result
from megatron_gspo.tools.rehearse.recorder import Recorder
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError
from megatron_gspo.tools.rehearse.shape_cache import ShapeCache

DEVICE = torch.device("cuda", 0)
_FACTORIES = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.zeros.default,
        torch.ops.aten.full.default,
        torch.ops.aten.ones.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_empty.default,
    }
)
_MISMATCH = ("same device", "two different devices", "Device Propagation")


class _Shapes(FakeTensorMode):
    """Torch's fake tensors beside real host tensors; nothing is computed on made-up data."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)


class FakeGpu(Recorder):
    """The mode in which a rank is rehearsed: results have shapes, and values where
    `known_values` follows them.
    """

    def __init__(self, *, expert_parallel: int = 1, imbalance: float = 1.0) -> None:
        super().__init__(expert_parallel=expert_parallel, imbalance=imbalance)
        self.shapes = _Shapes()
        self._cache = ShapeCache(self.shapes)

    def __torch_dispatch__(
        self, func: Operation, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Result:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        self.memory.index += 1
        if func.namespace == "c10d":
            return self.collectives.call(func, args, kwargs)
        if func.namespace.startswith("_c10d_functional"):
            raise RehearsalError(f"the rehearsal has no rule for the functional collective {func}")
        tensors = tensors_in((*args, *kwargs.values()))
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if not on_gpu and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_host(func, args, kwargs)
        if on_gpu and torch.device(kwargs["device"]).index is None:
            kwargs = {**kwargs, "device": DEVICE}
        if func in PRODUCTS:
            self._check_dtypes(func, tensors)
        rule = RULES.get(func)
        out = NotImplemented if rule is None else rule(self, func, args, kwargs)
        if out is NotImplemented:
            out = self.run(func, args, kwargs)
            if lost := self.values.follow(func, args, kwargs, out):
                self.host.find("made_up_value", f"lost in {lost}")
        flops = self.flops.count(func, args, kwargs, out)
        self.ops.record(func, args, kwargs, out, tensors, flops)
        for leaf in tensors_in((out,)):
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda":
                self.memory.add(leaf, str(func))
        return out

    def run(self, func: Operation, args: Args, kwargs: Kwargs) -> Result:
        """The shapes of an operation's results.

        Host tensors that a GPU would refuse are recorded and moved.
        """
        uses_host_indices(self, func, args)
        try:
            return self._cache.run(func, args, kwargs)
        except RuntimeError as error:
            text = str(error)
            if any(words in text for words in _MISMATCH):
                self.host.find("device_mix", f"{func} on tensors of cuda and cpu")
                return self.run(func, *tree_map(self._moved, (args, kwargs)))
            name = type(error).__name__
            if name in (
                "UnsupportedOperatorException",
                "DynamicOutputShapeException",
                "DataDependentOutputException",
            ):
                raise RehearsalError(
                    f"{func} has a result that the rehearsal can't compute ({name})"
                ) from error
            raise

    def upload(self, value: Tensor, **kwargs: Any) -> Tensor:
        """A new device tensor with known values."""
        with self.shapes:
            out = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
        self.values.set(out, value)
        return out

    def _on_host(self, func: Operation, args: Args, kwargs: Kwargs) -> Result:
        if kwargs.get("pin_memory"):
            return mark_pinned(self._on_host(func, args, {**kwargs, "pin_memory": False}))
        if self.fake_host_bytes is not None and func in _FACTORIES:
            size = args[0] if isinstance(args[0], (list, tuple)) else args[0].shape
            if math.prod(size) * 4 > self.fake_host_bytes:
                with self.shapes:
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _moved(self, leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dim():
            return self.upload(leaf.detach())
        return leaf

    def _check_dtypes(self, func: Operation, tensors: list[Tensor]) -> None:
        dtypes = {
            str(tensor.dtype).removeprefix("torch.")
            for tensor in tensors
            if tensor.dtype.is_floating_point
        }
        if len(dtypes) > 1:
            self.host.find("dtype_mix", f"{func} of {' and '.join(sorted(dtypes))}")
