"""The start-up hook for servers without a GPU, on stand-ins of the upstream modules; upstream:
tests/sglang.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_gspo.rollout.sglang.sglang_launch import patch_folder

FOLDER = Path(patch_folder())


def load_hook() -> ModuleType:
    """The file as a module of another name; as ``sitecustomize`` it would install itself."""
    spec = importlib.util.spec_from_file_location("sglang_hook", FOLDER / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


@pytest.fixture
def finders(monkeypatch) -> list:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    return sys.meta_path


def test_a_missing_kernel_package_can_be_imported_and_a_call_names_the_function(finders):
    finders.append(hook.KernelStandIn())
    kernels = importlib.import_module("sgl_kernel")
    try:
        with pytest.raises(NotImplementedError, match="sgl_kernel.move_cache: a stand-in"):
            kernels.move_cache(1, key=2)
        with pytest.raises(AttributeError):
            assert kernels.__path__
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("sgl_kernel_of_another_name")
    finally:
        del sys.modules["sgl_kernel"]


def test_a_function_is_called_once_after_its_module_s_import(finders, monkeypatch, tmp_path):
    (tmp_path / "imported_by_the_hook_test.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders.insert(
        0, hook.AfterImport({"imported_by_the_hook_test": lambda module: seen.append(module.value)})
    )
    importlib.import_module("imported_by_the_hook_test")
    del sys.modules["imported_by_the_hook_test"]
    importlib.import_module("imported_by_the_hook_test")
    assert seen == [1]


def test_install_puts_the_finders_in_place_once(finders):
    count = len(finders)
    hook.install()
    hook.install()
    assert len(finders) == count + 2
    assert isinstance(finders[0], hook.AfterImport) and isinstance(finders[-1], hook.KernelStandIn)


def test_newer_releases_allocate_unpinned(finders):
    pinned: list[bool] = []
    base = ModuleType("base")
    base.ALLOC_MEMORY_FUNCS = {
        "cpu": lambda dims, dtype, device, pin_memory, allocator: pinned.append(pin_memory)
    }
    hook.unpin_host_cache(base)
    hook.unpin_host_cache(base)
    base.ALLOC_MEMORY_FUNCS["cpu"]((2,), "int32", "cpu", True, None)
    assert pinned == [False]


def test_older_releases_build_the_cache_unpinned_and_torch_is_restored():
    def zeros(*sizes: int, **options: object) -> tuple:
        return sizes, options

    class BaseHostCache:
        def __init__(self, size: int):
            self.buffer = base.torch.zeros(size, pin_memory=True, dtype="int32")

    base = SimpleNamespace(torch=SimpleNamespace(zeros=zeros), BaseHostCache=BaseHostCache)
    hook.unpin_host_cache(base)
    first = BaseHostCache.__init__
    hook.unpin_host_cache(base)
    assert BaseHostCache.__init__ is first
    assert BaseHostCache(3).buffer == ((3,), {"dtype": "int32"}) and base.torch.zeros is zeros


def test_an_unknown_release_is_an_import_error_that_names_the_symbol():
    with pytest.raises(
        ImportError, match="cannot patch sglang.srt.state_capturer.base.BaseHostCache"
    ):
        hook.unpin_host_cache(ModuleType("base"))


def test_torchvision_with_its_library_is_left_alone():
    extension = SimpleNamespace(_has_ops=lambda: True)
    hook.define_vision_operators(extension)
    assert not hasattr(extension, hook.MARK)


@pytest.mark.parametrize(("switch", "installed"), [("1", True), ("", False)])
def test_a_process_with_the_folder_on_its_path_runs_the_hook_and_the_hidden_module(
    switch, installed, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.hidden_ran = True\n")
    code = (
        "import builtins, sys\nprint(builtins.hidden_ran, any(type(finder).__name__ =="
        " 'KernelStandIn' for finder in sys.meta_path))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(FOLDER), str(tmp_path))),
        "SGLANG_USE_CPU_ENGINE": switch,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"True {installed}\n"
