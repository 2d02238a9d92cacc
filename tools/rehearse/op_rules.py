"""What device operations do that fake tensors don't: one row of ``RULES`` for each.

A rule gets the mode, the operation and its arguments, and returns the result, or ``NotImplemented``
after it recorded something and the shapes are to be told as for any other operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_gspo.tools.rehearse.call_sites import call_site, frames_above
from megatron_gspo.tools.rehearse.fake_device.cuda_api import is_pinned
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError
from megatron_gspo.tools.rehearse.routing import expert_ids

aten = torch.ops.aten
Gpu = Any  # a FakeGpu, which has its rules from here
Rule = Callable[[Gpu, Operation, Args, Kwargs], Result]


def _read_scalar(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """The host waits for one number."""
    tensor = args[0]
    gpu.host.sync("item")
    value = gpu.values.get(tensor)
    return value.item() if value is not None else _neutral(gpu, tensor, "reads").item()


def _compare(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    gpu.host.sync(str(func))
    first, second = (gpu.values.get(tensor) for tensor in args[:2])
    if first is None or second is None:
        raise RehearsalError(f"{func} compares values that only a GPU computes, at {_here()}")
    return func(first, second)


def _convert(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """``tensor.to``: between host and device it is a copy."""
    tensor = args[0]
    device = kwargs.get("device")
    if device is None or torch.device(device).type == tensor.device.type:
        return NotImplemented
    if torch.device(device).type == "cuda":
        value = tensor.detach().clone().to(kwargs.get("dtype") or tensor.dtype)
        _record_copy(gpu, tensor, kwargs.get("non_blocking", False))
        out = gpu.run(func, args, kwargs)
        gpu.values.set(out, value)
        gpu.memory.add(out, str(func), _kind_of_copy(gpu))
        return out
    if not kwargs.get("non_blocking"):
        gpu.host.sync("copy to host")
    return _to_host(gpu, tensor, kwargs.get("dtype"))


def _kind_of_copy(gpu: Gpu) -> str:
    return "inputs" if gpu.memory.kind == "activations" else gpu.memory.kind


def _copy_into(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    target, source = args[:2]
    non_blocking = (args[2:] or (kwargs.get("non_blocking", False),))[0]
    if target.device.type == "cpu" and source.device.type == "cuda":
        if not (non_blocking and is_pinned(target)):
            gpu.host.sync("copy to host")
        if isinstance(target, FakeTensor):
            return target
        return func(target, _to_host(gpu, source, None))
    if target.device.type == "cuda" and source.device.type == "cpu" and source.dim():
        _record_copy(gpu, source, non_blocking)
        if isinstance(source, FakeTensor):
            gpu.values.forget(target)
            return target
        gpu.values.follow(func, args, {}, target)
        return target
    return NotImplemented


def _record_copy(gpu: Gpu, source: Tensor, non_blocking: bool) -> None:
    pinned = is_pinned(source)
    gpu.host.copy(
        source.numel() * source.element_size(),
        pinned=pinned,
        blocking=not (pinned and non_blocking),
    )


def _to_host(gpu: Gpu, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = gpu.values.get(tensor)
    limit = gpu.fake_host_bytes
    if value is None and limit is not None and tensor.numel() * tensor.element_size() > limit:
        with gpu.shapes:
            return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")
    if value is None:
        value = _neutral(gpu, tensor, "copies")
    return value.to(dtype or tensor.dtype, copy=True)


def _neutral(gpu: Gpu, tensor: Tensor, verb: str) -> Tensor:
    """In place of what only a GPU computes: ones for floating point, false for flags; integers
    decide shapes, so that none can be made up."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype is torch.bool:
        value = torch.zeros(tensor.shape, dtype=torch.bool)
    elif tensor.dtype.is_floating_point:
        value = torch.ones(tensor.shape, dtype=tensor.dtype)
    else:
        raise RehearsalError(
            f"the host {verb} {dtype} {tuple(tensor.shape)} that only a GPU computes, at {_here()}"
        )
    gpu.host.find("made_up_value", f"the host {verb} {dtype} {list(tensor.shape)}")
    return value


def _nonzero(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    return gpu.upload(_needed(gpu, func, args[0]).nonzero())


def _masked_select(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    tensor, mask = args
    known = _needed(gpu, func, mask)
    value = gpu.values.get(tensor)
    if value is not None:
        return gpu.upload(value.masked_select(known))
    count = int(known.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    with gpu.shapes:
        return torch.empty(count, dtype=tensor.dtype, device=tensor.device)


def _repeat_interleave(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    if kwargs.get("output_size") is not None:
        with gpu.shapes:
            out = torch.empty(kwargs["output_size"], dtype=args[0].dtype, device=args[0].device)
        value = gpu.values.get(args[0])
        if value is not None:
            gpu.values.set(out, torch.repeat_interleave(value))
        return out
    return gpu.upload(torch.repeat_interleave(_needed(gpu, func, args[0])))


def _index(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """Indexing by a mask: torch counts its ones on the host."""
    indices = args[1]
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    positions: list[Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            columns = _needed(gpu, func, index).nonzero().unbind(1)
            positions += [gpu.upload(column) for column in columns]
        else:
            positions.append(index)
    out = gpu.run(func, (args[0], positions), kwargs)
    gpu.values.follow(func, (args[0], positions), kwargs, out)
    return out


def _index_put(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """A mask and one value are a masked fill; a mask and several values are counted on the host."""
    if args[2].numel() > 1 and any(
        _is_mask(index) and index.device.type == "cuda" for index in args[1]
    ):
        gpu.host.sync(str(func))
    return NotImplemented


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _needed(gpu: Gpu, func: Operation, tensor: Tensor) -> Tensor:
    """The values that decide the shape of the result; the host reads their number."""
    value = gpu.values.get(tensor)
    if value is None:
        raise RehearsalError(
            f"the size of the result of {func} depends on what only a GPU computes, at {_here()}"
        )
    gpu.host.sync(str(func))
    return value


def _top_k(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """A router's choice, made up where the scores are unknown."""
    scores, k = args[:2]
    if scores.dim() != 2 or gpu.values.get(scores) is not None:
        return NotImplemented
    values, ids = gpu.run(func, args, kwargs)
    tokens, experts = scores.shape
    gpu.values.set(
        ids,
        expert_ids(
            tokens, experts, k, expert_parallel=gpu.expert_parallel, imbalance=gpu.imbalance
        ),
    )
    return values, ids


def _bincount(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    return gpu.upload(func(_needed(gpu, func, args[0]), *args[1:], **kwargs))


def _unique(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    result = func(_needed(gpu, func, args[0]), *args[1:], **kwargs)
    return tuple(gpu.upload(value) for value in result)


def _sum_into(gpu: Gpu, func: Operation, args: Args, kwargs: Kwargs) -> Result:
    """torch 2.11 takes the dtype of the result for a factor, where it computes shapes."""
    return kwargs["out"]


RULES: dict[Operation, Rule] = {
    aten.addmm.dtype_out: _sum_into,
    aten._local_scalar_dense.default: _read_scalar,
    aten.item.default: _read_scalar,
    aten.is_nonzero.default: _read_scalar,
    aten.equal.default: _compare,
    aten._to_copy.default: _convert,
    aten.copy_.default: _copy_into,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.topk.default: _top_k,
}

PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.mm.out,
        aten.addmm.default,
        aten.addmm.out,
        aten.addmm_.default,
        aten.bmm.default,
        aten.bmm.out,
        aten.baddbmm.default,
        aten.baddbmm.out,
        aten.baddbmm_.default,
        aten.mv.default,
        aten.dot.default,
        aten._grouped_mm.default,
    }
)
"""Products whose kernels take one dtype."""


def uses_host_indices(gpu: Gpu, func: Operation, args: Args) -> None:
    """Record the copies that indexing a device tensor by host tensors makes."""
    if func not in _INDEXING or args[0].device.type != "cuda":
        return
    for index in args[1]:
        if isinstance(index, Tensor) and index.device.type == "cpu":
            _record_copy(gpu, index, non_blocking=False)


_INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}


def _here() -> str:
    return " <- ".join(call_site(frames_above(2))[:3])
