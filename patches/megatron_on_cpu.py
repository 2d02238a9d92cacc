"""Let unmodified Megatron-Core run on a machine without an accelerator.

Upstream: megatron-core 0.16.1 to 0.19.2 name the device in literals (``device="cuda"``,
``torch.cuda.current_device()``), use CUDA streams and CUDA random state, let the distributed
optimizer accept parameters by their CUDA type name, take the optimizer kernels of Transformer
Engine or Apex where one is installed, and import torch's compiler for kernels of a GPU. Delete
when: Megatron-Core takes its device from the tensors or the process group.

Does nothing where CUDA is available. Not patched: graphs, fused kernels (they need a GPU).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_gspo.patches.mark import MARK, replace

_GPU_LIBRARIES = ("transformer_engine", "apex", "amp_C")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")


class _Stream:
    """A stream that does nothing: every method returns the stream itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _on_cpu(factory: Any) -> Any:
    """``factory`` with a literal ``device="cuda"`` read as the CPU."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _constant(value: Any) -> Any:
    """A maker for ``replace``: ignore the original, return a function that gives ``value``."""
    return lambda original: lambda *args, **kwargs: value


def _cuda_type_name(original: Any) -> Any:
    """``Tensor.type()`` as Megatron's optimizer expects it; a call with a type converts as
    before.
    """

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        name = original(self)
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.")

    return type_


def hide_gpu_libraries() -> None:
    """Make Transformer Engine and Apex look as if they were not installed, before Megatron is
    imported.
    """
    for name in _GPU_LIBRARIES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None: importing it is an ImportError


def _patch_torch() -> None:
    cpu = torch.device("cpu")
    # ``with torch.device("meta")`` finds the factories by identity, from a list that it makes once:
    # build it from the originals, or a model built later on the meta device (by Transformers) gets
    # uninitialised weights
    _device_constructors()
    for name in _FACTORIES:
        replace(torch, name, _on_cpu)
    replace(torch.Tensor, "type", _cuda_type_name)
    replace(torch.Tensor, "cuda", lambda _: lambda self, *args, **kwargs: self)
    replace(torch.nn.Module, "cuda", lambda _: lambda self, *args, **kwargs: self)
    replace(torch.cuda, "current_device", _constant(cpu))
    replace(torch.cuda, "current_stream", lambda _: lambda *args, **kwargs: _Stream())
    replace(torch.cuda, "stream", lambda _: lambda *args: contextlib.nullcontext())
    replace(torch.cuda, "synchronize", _constant(None))
    replace(torch.cuda, "get_rng_state", lambda _: lambda *args, **kwargs: torch.get_rng_state())
    replace(
        torch.cuda,
        "set_rng_state",
        lambda _: lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    replace(torch.cuda, "manual_seed", lambda _: lambda seed: torch.manual_seed(seed))
    if torch.cuda.Stream is not _Stream:  # type: ignore[comparison-overlap] # a class, since libraries name it in annotations
        torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]


@contextlib.contextmanager
def _without_unused_packages() -> Iterator[None]:
    """Within the context ``torch.compile`` returns the function itself, and wandb looks as if it
    were not installed.

    Megatron decorates its fused GPU kernels with the one, which imports the whole compiler, and
    imports the other for its inference engine: two seconds of CPU time in each process, for what
    is not called on a CPU.
    """
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    hides_wandb = "wandb" not in sys.modules
    if hides_wandb:
        sys.modules["wandb"] = None  # type: ignore[assignment] # as in hide_gpu_libraries
    try:
        yield
    finally:
        torch.compile = compile_function
        if hides_wandb:
            del sys.modules["wandb"]


def import_megatron() -> None:
    """Import Megatron without what only a GPU or its inference engine needs."""
    with _without_unused_packages():
        import megatron.core.tensor_parallel.random  # noqa: F401


def _patch_megatron() -> None:
    import_megatron()
    import megatron.core.tensor_parallel.random as random

    replace(random, "_get_cuda_rng_state", lambda _: lambda *args, **kwargs: torch.get_rng_state())
    replace(
        random,
        "_set_cuda_rng_state",
        lambda _: lambda state, *args, **kwargs: torch.set_rng_state(state),
    )


def is_applied() -> bool:
    """Whether this process runs Megatron on the CPU through this patch."""
    return bool(getattr(torch.cuda.current_device, MARK, False))


def apply() -> None:
    """Send Megatron's device literals, streams and random state to the CPU, and hide libraries that
    need a GPU; a no-op where CUDA is available."""
    if not is_applied() and torch.cuda.is_available():
        return
    hide_gpu_libraries()
    _patch_torch()
    _patch_megatron()
