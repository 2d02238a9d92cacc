"""Megatron-Core without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.patches import te_general_gemm
from tests.support.patched_policies import MCORE, on_cpu


@on_cpu
def test_device_literals_mean_the_cpu():
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn):
        assert (
            make(2, 3, device="cuda").device.type
            == make(2, device=torch.device("cuda", 0)).device.type
            == "cpu"
        )
    assert torch.tensor([1, 2], device="cuda:3").tolist() == [1, 2]
    assert torch.arange(3, device=torch.cuda.current_device()).tolist() == [0, 1, 2]
    assert torch.full((2,), 7, device="meta").device.type == "meta", (
        "other devices stay what they are"
    )
    assert (
        torch.ones(1).cuda().device.type == torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
    )
    assert (
        torch.ones(1).type() == "torch.cuda.FloatTensor"
        and torch.ones(1).type(torch.float64).dtype == torch.float64
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


WITHOUT = """
import torch
for literal in (
    lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), lambda: torch.cuda.current_device()
):
    try:
        literal()
        raise SystemExit("worked without the patch")
    except (AssertionError, RuntimeError):
        pass
torch.cuda.is_available = lambda: True
before = {name: getattr(owner, name) for owner, name in [
    (torch, "zeros"), (torch.cuda, "current_device"), (torch.Tensor, "cuda"), (torch.distributed, "all_gather")]}
from megatron_gspo.patches import megatron_on_cpu, moe_uneven_collectives
megatron_on_cpu.apply()
moe_uneven_collectives.apply()
assert not megatron_on_cpu.is_applied()
assert torch.zeros is before["zeros"] and torch.cuda.current_device is before["current_device"]
assert torch.Tensor.cuda is before["cuda"] and torch.distributed.all_gather is before["all_gather"]
torch.cuda.is_available = lambda: False
megatron_on_cpu.apply()
moe_uneven_collectives.apply()
assert megatron_on_cpu.is_applied() and torch.zeros is not before["zeros"]
assert torch.distributed.all_gather is not before["all_gather"]
print("done")
"""


@on_cpu
def test_literals_fail_without_the_patch_and_where_cuda_is_available_it_changes_nothing():
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split()[-1:] == ["done"], done.stdout + done.stderr


@on_cpu
@pytest.mark.parametrize("patched", [False, True])
def test_transformer_engine_is_not_imported_without_a_gpu(tmp_path, patched):
    """Nor, with the patch, what costs seconds and only a GPU or the inference engine needs."""
    (tmp_path / "transformer_engine.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file')"
    )
    code = (
        "import megatron_gspo.mcore\n" * patched
        + "from megatron.core.optimizer import clip_grads as found"
    )
    code += "\nprint(found.multi_tensor_applier.__module__)"
    code += "\nimport sys\nprint(*sys.modules.keys() & {'torch._inductor.compile_fx', 'wandb'})"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    if patched:
        assert done.stdout.split() == ["megatron.core.utils"], done.stderr
    else:
        assert "OSError: libcuda.so.1" in done.stderr


def test_the_router_runs_without_transformer_engine(monkeypatch):
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(2, 4, requires_grad=True)
    if MCORE < (0, 17):
        monkeypatch.delattr(moe_utils, "te_general_gemm")
        with pytest.raises(NameError, match="te_general_gemm"):
            moe_utils.router_gating_linear(hidden, weight, None, torch.float32)
        te_general_gemm.apply()
    else:
        before = vars(moe_utils)["te_general_gemm"]
        te_general_gemm.apply()
        assert vars(moe_utils)["te_general_gemm"] is before
    logits = moe_utils.router_gating_linear(hidden, weight, None, torch.float32)
    assert torch.allclose(logits, hidden @ weight.t())
