"""``torch.cuda`` and other calls of a driver, replaced by values without a GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # before there is a GPU: it would import the driver's functions
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from megatron_gspo.tools.rehearse.host_log import HostLog

GPU_NAME = "fake GPU"
_CAPABILITY = (9, 0)
_CUDNN_VERSION = 92400
_GPU_MEMORY = 80 * 2**30
_GPUS = 8
_PINNED = "_rehearsal_pinned"


@contextlib.contextmanager
def fake_cuda(host: HostLog, free_bytes: int = 0) -> Iterator[None]:
    """Within the context there is one CUDA device, whose tensors are fake.

    Waiting for it is recorded in ``host``. free_bytes: what its driver says is free; with 0 only
    the memory is used that a step needs.
    """
    _device_constructors()  # ``with torch.device(...)`` has the originals only, from a list that it makes once
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)

        for name, value in _cuda_functions(host, free_bytes).items():
            for owner in (torch.cuda, torch.cuda.random, torch.cuda.memory):
                if owner is torch.cuda or hasattr(owner, name):
                    replace(owner, name, value)
        # torch 2.15 asks for it to choose a kernel of variable-length attention. A build for CUDA
        # cannot answer on a machine without a driver.
        replace(torch.backends.cudnn, "version", _returning(_CUDNN_VERSION))
        for name in ("range_push", "range_pop", "mark"):
            replace(torch.cuda.nvtx, name, lambda *args, **kwargs: None)
        for name, make in _TENSOR_METHODS.items():
            made = make(getattr(Tensor, name))
            for kind in (Tensor, FakeTensor) if name in vars(FakeTensor) else (Tensor,):
                replace(kind, name, made)
        replace(torch, "tensor", _tensor(torch.tensor))
        # it makes a tensor on the driver's first device; a CUDA build asks
        # `torch.cuda.is_available`, which says yes
        replace(fake_tensor, "init_gpu_context", lambda device: None)
        replace(torch._dynamo.config, "disable", True)
        replace(torch.nn.Module, "_apply", _apply)
        # torch.tensor(..., device="cuda") makes a host tensor and copies it, so that the copy is
        # seen
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        yield


class FakeEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class FakeStream:
    """A stream without work. One object can be any stream: they compare equal."""

    cuda_stream = 0
    stream_id = 0
    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True


def _cuda_functions(host: HostLog, free_bytes: int) -> dict[str, Any]:
    def wait(kind: str) -> Callable[..., None]:
        return lambda *args, **kwargs: host.sync(kind)

    class Event(FakeEvent):
        synchronize = wait("event.synchronize")

    class Stream(FakeStream):
        synchronize = wait("stream.synchronize")

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    stream = Stream()
    generator = torch.Generator()
    properties = types.SimpleNamespace(
        name=GPU_NAME,
        total_memory=_GPU_MEMORY,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=132,
        uuid="0",
        warp_size=32,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
        L2_cache_size=50 * 2**20,
    )
    return {
        **{name: _returning(None) for name in _NOTHING},
        **{name: _returning(0) for name in _ZERO},
        "is_available": _returning(True),
        "is_initialized": _returning(True),
        "is_bf16_supported": _returning(True),
        "is_current_stream_capturing": _returning(False),
        "_is_compiled": _returning(True),
        "device_count": _returning(_GPUS),
        "get_device_capability": _returning(_CAPABILITY),
        "get_device_properties": _returning(properties),
        "get_device_name": _returning(GPU_NAME),
        "mem_get_info": _returning((free_bytes, _GPU_MEMORY)),
        "memory_stats": lambda *args, **kwargs: {},
        "synchronize": wait("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        "stream": lambda *args: contextlib.nullcontext(),
        "device": lambda *args: contextlib.nullcontext(),
        "default_generators": (generator,) * _GPUS,
        "get_rng_state": lambda *args, **kwargs: generator.get_state(),
        "set_rng_state": lambda state, *args, **kwargs: generator.set_state(state),
    }


_NOTHING = (
    "_lazy_init",
    "init",
    "set_device",
    "set_stream",
    "manual_seed",
    "manual_seed_all",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
)
_ZERO = (
    "current_device",
    "max_memory_allocated",
    "memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# Methods of tensors


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor is in pinned memory, or would be."""
    return bool(getattr(tensor.untyped_storage(), _PINNED, False))


def mark_pinned(tensor: Tensor) -> Tensor:
    """The tensor, whose memory counts as pinned from now on."""
    setattr(tensor.untyped_storage(), _PINNED, True)
    return tensor


def _pin_memory(original: Any) -> Any:
    return lambda self, *args: self if is_pinned(self) else mark_pinned(self.clone())


def _through_host(original: Any) -> Any:
    """A method that reads memory directly: it copies to the host first, which is seen and
    answered.
    """
    return lambda self, *args, **kwargs: original(
        self.cpu() if isinstance(self, FakeTensor) and self.device.type == "cuda" else self,
        *args,
        **kwargs,
    )


def _cuda_type_name(original: Any) -> Any:
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if args or kwargs or self.device.type != "cuda" or "cuda" in name:
            return name
        return name.replace("torch.", "torch.cuda.")

    return type_


_TENSOR_METHODS: dict[str, Callable[[Any], Any]] = {
    "pin_memory": _pin_memory,
    "is_pinned": lambda original: lambda self, *args: is_pinned(self),
    "tolist": _through_host,
    "type": _cuda_type_name,
    "record_stream": lambda original: lambda self, stream: None,
}


def _tensor(original: Any) -> Any:
    """``torch.tensor`` of a list with device tensors reads each of them."""

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            data = tree_map(
                lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, data
            )
        return original(data, *args, **kwargs)

    return tensor


def _apply(
    self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """``Module._apply``, with which ``.cuda()`` and ``.to()`` convert parameters. Torch changes a
    parameter's data in place and so keeps what is attached to it; a host tensor can't become a fake
    one in place."""
    for module in self.children() if recurse else ():
        module._apply(fn)
    for key, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            new = fn(parameter)
        if new is not parameter:
            made = torch.nn.Parameter(new, parameter.requires_grad)
            for name, value in vars(parameter).items():
                if name not in vars(made) and name != "_rehearsal_known":
                    setattr(made, name, value)
            self._parameters[key] = made
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self
