"""What the start-up hook for servers without a GPU bridges: upstream's own code fails without
it and works with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch, patch_folder
from megatron_gspo.servers.server_launch import package_version

# Run by the server's interpreter, with the hook: each part is tried, then taken away and tried
# again, in one process since importing sglang takes seconds. torchvision comes first, in a fork:
# what is declared can't be taken back.
PROGRAM = """
import importlib, inspect, json, os, sys
import sitecustomize as hook
import torch

def attempt(part, function):
    try:
        function()
        print(json.dumps([part, "works"]), flush=True)
    except Exception as error:
        print(json.dumps([part, f"{type(error).__name__}: {error}"]), flush=True)

child = os.fork()
if child == 0:
    sys.meta_path[0].functions.clear()
    attempt("vision without", lambda: importlib.import_module("torchvision"))
    os._exit(0)
os.waitpid(child, 0)
attempt("vision", lambda: importlib.import_module("torchvision"))

from sglang.srt.state_capturer import base

def host_cache():
    device = ["cpu"] if "device" in inspect.signature(base.BaseHostCache).parameters else []
    buffer = base.BaseHostCache(16, 4, 2, "routed_experts", *device).buffer
    assert buffer.shape == (16, 4, 2) and buffer.dtype == torch.int32 and not buffer.any()

attempt("cache", host_cache)
if hasattr(base, "ALLOC_MEMORY_FUNCS"):
    base.ALLOC_MEMORY_FUNCS["cpu"] = getattr(base.ALLOC_MEMORY_FUNCS["cpu"], hook.MARK)
else:
    base.BaseHostCache.__init__ = getattr(base.BaseHostCache.__init__, hook.MARK)
attempt("cache without", host_cache)

def kernels():
    sys.modules.pop("sgl_kernel", None)
    sys.modules.pop("sglang.kernels.ops.kvcache.cache_move", None)
    importlib.import_module("sglang.kernels.ops.kvcache.cache_move")

def adapters():
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend
    assert layers.torch.tensor([1], pin_memory=True).tolist() == torch.ones(1).pin_memory().tolist() == [1]
    assert torch_backend.torch.zeros((1,), dtype=torch.int32, pin_memory=True).tolist() == [0]

attempt("adapters", adapters)
from sglang.srt.lora import layers
layers.torch = torch
attempt("adapters without", adapters)

attempt("kernels", kernels)
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, hook.KernelStandIn)]
attempt("kernels without", kernels)
"""


@pytest.fixture(scope="module")
def attempts(sglang_python: str) -> dict[str, str]:
    """What became of each part: "works" or an error."""
    environment = {
        **os.environ,
        "PYTHONPATH": patch_folder(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sglang_python, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


PARTS = {
    "vision": "operator torchvision::nms does not exist",
    "cache": "CUDA|accelerator|NVIDIA|cudart",
    "adapters": "pin_memory|pinned memory|accelerator",
    "kernels": "No module named 'sgl_kernel'",
}


@pytest.mark.parametrize("part", PARTS)
def test_upstream_works_with_the_hook_and_fails_without(attempts, sglang_python, part):
    if part == "kernels" and package_version(sglang_python, SGLangLaunch.packages, "sglang") < (
        0,
        5,
        23,
    ):
        pytest.skip("this version imports no kernels on a CPU")
    assert attempts[part] == "works"
    without = attempts[f"{part} without"]
    assert re.search(PARTS[part], without), (
        f"upstream, without this part of the hook: {without}; delete it if it works"
    )
