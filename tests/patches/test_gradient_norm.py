"""The gradient norm of an optimizer step: its value, and how often the host waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from megatron_gspo.patches import gradient_norm
from megatron_gspo.patches.gradient_norm import foreach_l2_norm, foreach_scale
from megatron_gspo.patches.mark import MARK
from tests.equivalence.cases import make_samples
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.patched_policies import policy_in


class Calls(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def with_gradients(path: str) -> Policy:
    policy = policy_in(path, parallel(), distributed_optimizer=True)
    batch = TrainingBatch.of(make_samples(count=4))
    batches = pack_mini_batch(policy, batch, micro_batches_of(64), optional=(), routing=None)
    forward_backward(policy, preset("sft"), batches, temperature=1.0)
    return policy


def steps(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """A step with the patch and with upstream's function in its place: (norm, values read)."""
    outcomes: dict[str, Any] = {}
    patched = clip_grads.l2_norm_impl
    for name, function in (("patched", patched), ("upstream", getattr(patched, MARK))):
        policy = with_gradients(path)
        clip_grads.l2_norm_impl = function
        _, norm, _ = policy.optimizer.step()
        with Calls() as calls:  # megatron-core 0.19 reads a flag in the first step
            policy.optimizer.step()
        outcomes[name] = float(norm), calls.names.count("_local_scalar_dense")
    return outcomes


@pytest.mark.skipif(
    clip_grads.l2_norm_impl is not foreach_l2_norm,
    reason="Transformer Engine or Apex computes the norm",
)
def test_an_optimizer_step_reads_one_norm(path):
    outcomes = run_distributed(steps, 1, path)[0]
    (norm, reads), (upstream_norm, _) = outcomes["patched"], outcomes["upstream"]
    assert norm == pytest.approx(upstream_norm, rel=1e-6) and norm > 0
    assert reads == 1


def test_the_norm_stays_on_the_device_and_upstreams_does_not():
    """On the meta device nothing can be read.

    Upstream reads within ``torch.tensor``, which no mode intercepts.
    """
    arguments = (
        65536,
        torch.zeros(1, device="meta"),
        [[torch.empty(3, device="meta"), torch.empty(2, device="meta")]],
    )
    assert foreach_l2_norm(*arguments, False)[0].device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        local_multi_tensor_l2_norm(*arguments, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_tensors_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5), (7,), ())]
    norm, per_tensor = foreach_l2_norm(65536, torch.zeros(1), [tensors], False)
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert norm.shape == (1,) and norm.dtype == torch.float32 and per_tensor is None
    torch.testing.assert_close(norm[0].double(), expected, rtol=1e-6, atol=0)


def test_clipping_makes_no_new_tensor_and_upstreams_does():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), ())]
    expected = [gradient.clone() for gradient in gradients]
    with Calls() as upstream:
        local_multi_tensor_scale(65536, torch.zeros(1), [expected, expected], 0.3)
    with Calls() as ours:
        foreach_scale(65536, torch.zeros(1), [gradients, gradients], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert ours.names.count("_foreach_mul_") == 1 and "copy_" not in ours.names
    assert upstream.names.count("copy_") == 3
    results = [torch.empty_like(gradient) for gradient in gradients]
    foreach_scale(65536, torch.zeros(1), [gradients, results], 2.0)
    assert all(torch.equal(a, 2.0 * b) for a, b in zip(results, gradients, strict=True))
    foreach_scale(65536, torch.zeros(1), [[], []], 2.0)


def test_a_kernel_of_another_library_is_left_alone(monkeypatch):
    def kernel() -> None:
        pass

    monkeypatch.setattr(clip_grads, "l2_norm_impl", kernel)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", kernel)
    gradient_norm.apply()
    assert clip_grads.l2_norm_impl is clip_grads.multi_tensor_scale_impl is kernel
    monkeypatch.delattr(clip_grads, "l2_norm_impl")
    with pytest.raises(ImportError, match="l2_norm_impl"):
        gradient_norm.apply()
