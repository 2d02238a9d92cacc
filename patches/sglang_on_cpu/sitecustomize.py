"""Let the registry's sglang wheel serve on a machine without a GPU.

Python imports a module of this name at its start, in every process, so this folder on
``PYTHONPATH`` together with ``SGLANG_USE_CPU_ENGINE=1`` (sglang's own switch) is all that a server
and its children need; ``rollout/sglang/sglang_launch.py`` sets both where there is no GPU. It runs
inside sglang's environment, where nothing of this project is installed: standard library only, and
torch where it's loaded anyway.

Upstream, sglang 0.5.15.post1 to 0.5.23, whose CPU build is on no index:

1. ``sglang.srt`` imports names of ``sgl_kernel`` while it's being imported, though without Intel
   AMX its torch-native code runs and calls none of them. The package for CPUs is only built from
   source.
2. ``--enable-return-routed-experts`` pins its host buffer through CUDA on every device
   (``sglang/srt/state_capturer/base.py``, ``BaseHostCache``).
3. torchvision, which sglang imports, describes two operators of its C++ library that failed to load
   because it was built for CUDA (``torchvision/_meta_registrations.py``: ``operator
   torchvision::nms does not exist``).
4. The layers and batches of LoRA adapters (``sglang/srt/lora``, its torch backend too) are pinned
    on every device.

Delete when: the wheel serves a mixture of experts with ``--device cpu
--enable-return-routed-experts`` by itself.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "_megatron_gspo_patch"  # on a replacement: the original (patches/mark.py)


class KernelStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An ``sgl_kernel`` whose functions can be imported; a call raises an error that names it."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "sgl_kernel" else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)

            def call(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(
                    f"sgl_kernel.{name}: a stand-in; there are no kernels without a GPU"
                )

            return call

        setattr(module, MARK, None)
        module.__getattr__ = missing  # type: ignore[method-assign]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been executed."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        function = self.functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_correct(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_then_correct  # type: ignore[method-assign]
        return spec


def unpin_host_cache(base: ModuleType) -> None:
    """Keep the routed experts' host buffer in ordinary memory."""
    if hasattr(base, "ALLOC_MEMORY_FUNCS"):  # newer releases: a table of allocators by device
        pinned = base.ALLOC_MEMORY_FUNCS["cpu"]
        if hasattr(pinned, MARK):
            return

        def unpinned(
            dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *rest: Any
        ) -> Any:
            return pinned(dims, dtype, device, False, allocator, *rest)

        setattr(unpinned, MARK, pinned)
        base.ALLOC_MEMORY_FUNCS["cpu"] = unpinned
        return
    if not hasattr(base, "BaseHostCache"):
        raise ImportError(
            "cannot patch sglang.srt.state_capturer.base.BaseHostCache: no such symbol; "
            "this upstream version is unknown"
        )
    init = base.BaseHostCache.__init__
    if hasattr(init, MARK):
        return

    @functools.wraps(init)
    def init_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        torch = base.torch
        zeros = torch.zeros
        torch.zeros = lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options)
        try:
            init(self, *args, **kwargs)
        finally:
            torch.zeros = zeros

    setattr(init_unpinned, MARK, init)
    base.BaseHostCache.__init__ = init_unpinned


class _UnpinnedTorch:
    """torch without pinned memory."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros"):
            return found
        return lambda *args, pin_memory=False, **options: found(*args, **options)


def unpin_adapters(module: ModuleType) -> None:
    """Keep what a module of ``sglang.srt.lora`` makes in ordinary memory."""
    torch = module.torch
    if isinstance(torch, _UnpinnedTorch):
        return
    pin = torch.Tensor.pin_memory
    if not torch.cuda.is_available() and not hasattr(pin, MARK):

        def unpinned(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self

        setattr(unpinned, MARK, pin)
        torch.Tensor.pin_memory = unpinned
    module.torch = _UnpinnedTorch(torch)  # type: ignore[attr-defined]


def define_vision_operators(extension: ModuleType) -> None:
    """Declare the operators that torchvision describes, where its library didn't load; nothing
    implements them.
    """
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    setattr(extension, MARK, library)  # the declarations live as long as this object


def install() -> None:
    """Put the two finders in place, once."""
    if any(isinstance(finder, KernelStandIn) for finder in sys.meta_path):
        return
    sys.meta_path.insert(
        0,
        AfterImport(
            {
                "sglang.srt.state_capturer.base": unpin_host_cache,
                "sglang.srt.lora.layers": unpin_adapters,
                "sglang.srt.lora.lora": unpin_adapters,
                "sglang.srt.lora.backend.torch_backend": unpin_adapters,
                "torchvision.extension": define_vision_operators,
            }
        ),
    )
    # Last: a kernel package that is installed is found before it.
    sys.meta_path.append(KernelStandIn())


def run_shadowed(name: str) -> None:
    """Execute the next module of this name on the path, which this one hides."""
    here = Path(__file__).parent.resolve()
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        install()
    run_shadowed("sitecustomize")
