"""Every correction of an upstream package: the defect without it, the right result with it, where it does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.algorithms import preset
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.micro_batches import micro_batches
from megatron_gspo.mcore.model import ModelSettings, build_model
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, Policy, build_policy
from megatron_gspo.mcore.process_groups import Layout
from megatron_gspo.mcore.train_step import Batching, forward_backward, train_mini_batch
from megatron_gspo.patches import expert_gradients, te_general_gemm
from megatron_gspo.patches.mark import MARK, replace
from tests.equivalence.cases import make_samples
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import worst_error

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the patch does nothing where CUDA is available")


# --- the mark -----------------------------------------------------------------------------------------------


def test_replace_works_once_and_keeps_the_original():
    owner = SimpleNamespace(double=lambda x: 2 * x)
    original = owner.double

    def plus_one(function: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: function(x) + 1

    replace(owner, "double", plus_one)
    first = owner.double
    replace(owner, "double", plus_one)
    assert owner.double is first and owner.double(3) == 7
    assert getattr(owner.double, MARK) is original


def test_a_missing_symbol_is_an_import_error_that_names_it():
    with pytest.raises(ImportError, match=r"cannot patch torch.distributed.no_such_function: .* version is unknown"):
        replace(dist, "no_such_function", lambda original: original)


# --- Megatron on a CPU --------------------------------------------------------------------------------------


@on_cpu
def test_device_literals_mean_the_cpu():
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn):
        assert make(2, 3, device="cuda").device.type == make(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.tensor([1, 2], device="cuda:3").tolist() == [1, 2]
    assert torch.arange(3, device=torch.cuda.current_device()).tolist() == [0, 1, 2]
    assert torch.full((2,), 7, device="meta").device.type == "meta", "other devices stay what they are"
    assert torch.ones(1).cuda().device.type == torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor" and torch.ones(1).type(torch.float64).dtype == torch.float64
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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["done"], done.stdout + done.stderr


# --- a name that is defined only with Transformer Engine ----------------------------------------------------


def test_the_router_runs_without_transformer_engine(monkeypatch):
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    if VERSION < (0, 17):
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


# --- collectives with parts of unequal size -----------------------------------------------------------------


def exchange(rank: int, world_size: int) -> dict[str, Any]:
    """Rank r has r + 1 rows for everyone; what upstream's and the corrected collectives make of it."""
    rows = torch.arange(3 * (rank + 1), dtype=torch.float32).view(-1, 3) + 100 * rank
    sizes = [1, 2]
    found: dict[str, Any] = {"errors": []}
    upstream = getattr(dist.all_to_all_single, MARK)
    whole = torch.cat([torch.full((sizes[to], 2), 10.0 * rank + to) for to in range(2)])
    out = torch.zeros(2 * sizes[rank], 2)
    splits = torch.tensor(sizes), torch.tensor([sizes[rank]] * 2)
    try:
        upstream(out, whole, splits[1], splits[0])
    except TypeError as error:
        found["errors"].append(str(error))
    dist.all_to_all_single(out, whole, splits[1], splits[0])
    found["all_to_all"] = out[:, 0].tolist()
    parts = [torch.zeros(size, 3) for size in sizes]
    dist.all_gather(parts, rows)
    found["all_gather"] = parts
    reduced = torch.zeros(sizes[rank], 3)
    dist.reduce_scatter(reduced, [torch.full((size, 3), float(rank + 1)) for size in sizes])
    found["reduce_scatter"] = reduced
    even = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(even, torch.full((2,), float(rank)))
    found["even"] = torch.stack(even)[:, 0].tolist()
    return found


@on_cpu
def test_unequal_parts_are_exchanged():
    for rank, found in enumerate(run_distributed(exchange, 2, timeout=30)):
        assert len(found["errors"]) == 1, "upstream takes tensors as split sizes: delete the patch"
        assert found["all_to_all"] == [0.0 + rank] * (rank + 1) + [10.0 + rank] * (rank + 1)
        expected = [torch.arange(3.0).view(1, 3), torch.arange(6.0).view(2, 3) + 100]
        assert all(torch.equal(a, b) for a, b in zip(found["all_gather"], expected, strict=True))
        assert torch.equal(found["reduce_scatter"], torch.full((rank + 1, 3), 3.0))
        assert found["even"] == [0.0, 1.0]


def gather_upstream(rank: int, world_size: int) -> None:
    getattr(dist.all_gather, MARK)([torch.zeros(1, 3), torch.zeros(2, 3)], torch.zeros(rank + 1, 3))


@on_cpu
def test_gloo_refuses_unequal_parts_without_the_patch():
    with pytest.raises(RuntimeError, match="(?i)size|shape"):
        run_distributed(gather_upstream, 2, timeout=15)


# --- expert gradients and the interleaved pipeline ----------------------------------------------------------


def policy_in(path: str, layout: Layout, *, distributed_optimizer: bool = False) -> Policy:
    return build_policy(
        path, layout, groups_of(layout), model=ModelSettings(), optimizer=OptimizerSettings(lr=1e-3),
        data_parallel=DataParallelSettings(distributed_optimizer=distributed_optimizer),
    )


def gradients(policy: Policy) -> dict[str, Tensor]:
    batches = micro_batches(make_samples(count=8), policy.config, policy.groups, max_tokens=64, micro_batch_size=2)
    forward_backward(policy, preset("sft"), batches, temperature=1.0)
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    stream = export_weights(chunks, policy.family, policy.shape, policy.groups, value=lambda p: p.main_grad)
    return {name: value.clone() for name, value in stream}


def guarded_and_not(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Gradients with data parallelism alone, and in two layouts that upstream gets wrong, without and with our part."""
    policy = policy_in(path, Layout())
    truth = gradients(policy)
    interleaved = policy_in(path, Layout(pipeline=2, virtual_pipeline=2))
    settings = interleaved.config.overlap_p2p_comm, interleaved.config.batch_p2p_comm
    with_guard = gradients(interleaved)
    for chunk in interleaved.chunks:
        unwrap(chunk).config.overlap_p2p_comm, unwrap(chunk).config.batch_p2p_comm = False, True
    without_guard = gradients(interleaved)

    layout = Layout(tensor=2)
    tensor = policy_in(path, layout)
    with_patch = gradients(tensor)
    again = expert_gradients.apply(unwrap(tensor.chunks[0]), tensor.config)
    apply, expert_gradients.apply = expert_gradients.apply, lambda model, config: 0
    try:
        without_patch = gradients(policy_in(path, layout))
        bare = build_model(tensor.shape, layout, ModelSettings(), tensor.groups)[0]
    finally:
        expert_gradients.apply = apply
    changed = apply(bare, bare.config)
    errors = {key: worst_error(found, truth) for key, found in [
        ("p2p guarded", with_guard), ("p2p unguarded", without_guard),
        ("experts patched", with_patch), ("experts unpatched", without_patch)]}
    return {"errors": errors, "settings": settings, "changed": changed, "again": again}


def grad_norms(rank: int, world_size: int, path: str) -> dict[str, float]:
    """Gradient norms with data parallelism alone, and of experts marked as Transformer Engine's grouped ones are."""

    def norm(layout: Layout) -> float:
        policy = policy_in(path, layout, distributed_optimizer=True)
        gradients(policy)
        return float(policy.optimizer.step()[1])

    apply = expert_gradients.apply

    def as_grouped(model: Any, config: Any) -> int:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce, parameter.tensor_model_parallel = False, False
        return 0

    def then_patched(model: Any, config: Any) -> int:
        return as_grouped(model, config) + apply(model, config)

    found = {"truth": norm(Layout())}
    for name, expert_gradients.apply in [("unpatched", as_grouped), ("patched", then_patched)]:
        found[name] = norm(Layout(tensor=2, expert=2))
    expert_gradients.apply = apply
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", num_experts=4)


@pytest.fixture(scope="module")
def defects(path) -> dict[str, Any]:
    return run_distributed(guarded_and_not, 2, path, timeout=90)[0]


def test_expert_gradients_are_added_up_over_tensor_parallel_replicas(defects):
    name, error = defects["errors"]["experts patched"]
    assert error < 1e-5, name
    name, error = defects["errors"]["experts unpatched"]
    parameters = 4 * 4 * 2  # layers, experts, linear_fc1 and linear_fc2
    if VERSION < (0, 19):
        assert error > 0.1 and ".experts." in name
        assert defects["changed"] == parameters
    else:
        assert error < 1e-5, "upstream is wrong here: widen the version range of the patch"
        assert defects["changed"] == 0
    assert defects["again"] == 0


def test_every_expert_counts_in_the_gradient_norm(path):
    for found in run_distributed(grad_norms, 2, path, timeout=60):
        assert found["patched"] == pytest.approx(found["truth"], rel=1e-5)
        if VERSION < (0, 19):
            assert found["unpatched"] < 0.99 * found["truth"]
        else:
            assert found["unpatched"] == pytest.approx(found["truth"], rel=1e-5)


def test_two_interleaved_stages_exchange_unbatched(defects):
    assert defects["settings"] == (True, False)
    assert defects["errors"]["p2p guarded"][1] < 1e-5
    assert defects["errors"]["p2p unguarded"][1] > 0.1, "upstream tells the directions apart: delete the guard"


# --- the step count of torch's Adam -------------------------------------------------------------------------


def steps_of(policy: Policy) -> list[Tensor]:
    return [state["step"] for state in policy.optimizer.chained_optimizers[0].optimizer.state.values()]


def step(policy: Policy) -> None:
    train_mini_batch(policy, make_samples(count=4), preset("sft"), Batching(64), temperature=1.0)


def resume_unpatched(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint of one step with the patched methods, and with each of upstream's in its place."""
    policy = policy_in(path, Layout(), distributed_optimizer=True)
    step(policy)
    at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    found: dict[str, Any] = {}
    fresh = policy_in(path, Layout(), distributed_optimizer=True)
    load_checkpoint(fresh, at)
    found["loaded"] = [float(value) for value in steps_of(fresh)]
    step(fresh)
    found["then"] = [float(value) for value in steps_of(fresh)]
    names = ("state_dict", "_set_main_param_and_optimizer_states")
    patched = {name: getattr(DistributedOptimizer, name) for name in names}
    upstream = {name: getattr(function, MARK) for name, function in patched.items()}

    def with_step_given(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        upstream["_set_main_param_and_optimizer_states"](self, model_param, {**tensors, "step": state["step"]})

    DistributedOptimizer.state_dict = upstream["state_dict"]
    with pytest.raises(CheckpointError, match="AssertionError"):
        load_checkpoint(policy_in(path, Layout(), distributed_optimizer=True), at)
    DistributedOptimizer.state_dict = patched["state_dict"]
    DistributedOptimizer._set_main_param_and_optimizer_states = upstream["_set_main_param_and_optimizer_states"]
    with pytest.raises(CheckpointError, match="KeyError: 'step'"):
        load_checkpoint(policy_in(path, Layout(), distributed_optimizer=True), at)
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step_given
    shared = policy_in(path, Layout(), distributed_optimizer=True)
    load_checkpoint(shared, at)
    step(shared)
    found["shared"] = [float(value) for value in steps_of(shared)]
    return found


def test_adam_steps_once_for_each_step_after_a_resume(path, tmp_path):
    found = run_distributed(resume_unpatched, 1, path, str(tmp_path), timeout=60)[0]
    parameters = len(found["loaded"])
    assert found["loaded"] == [1.0] * parameters and found["then"] == [2.0] * parameters
    assert found["shared"] == [1.0 + parameters] * parameters, "upstream gives each its own step: shorten the patch"
