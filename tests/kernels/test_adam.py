"""The kernel of Adam against torch's operations, and a model trained with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.kernels.operators import adam_step
from megatron_gspo.mcore import adam as kernel_adam
from megatron_gspo.mcore.checkpoint.owned_state import optimizer_numbers
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.policy_tensors import torch_optimizers
from megatron_gspo.mcore.train_step import forward_backward, optimizer_step, pack_mini_batch
from tests.equivalence.cases import make_samples
from tests.equivalence.measure import MODELS
from tests.kernels.errors import check_operator
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

# of tensors below, of and above a program's elements, one of them empty
SIZES = [1, 0, 1024, 5, 3 * 1024 + 7]
NUMBERS = dict(lr=0.1, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01)


def draw(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tensors(seed: int, first: int = 0) -> list[Tensor]:
    """Of all sizes, each ``first`` elements behind the beginning of its memory."""
    return [draw(first + size, seed + i)[first:] for i, size in enumerate(SIZES)]


def cut(x: Tensor) -> Tensor:
    """To bfloat16 as the interpreter does, which does not round."""
    return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


def composite(
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    weights: Sequence[Tensor],
    clip: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
) -> None:
    """`adam_step` in torch's operations."""
    for i, (value, grad, mean, square) in enumerate(zip(main, grads, means, squares, strict=True)):
        clipped = grad * clip
        mean += (clipped - mean) * (1 - beta1)
        square.mul_(beta2).add_(clipped * (1 - beta2) * clipped)
        root = square.double().sqrt().float()  # torch's in float32 is off by a bit on some CPUs
        scale = root / (1 - beta2**step) ** 0.5 + eps
        value.mul_(1 - lr * weight_decay).sub_(mean * (lr / (1 - beta1**step)) / scale)
        if weights:
            weights[i].copy_(cut(value.detach()))


@pytest.mark.parametrize("first", [0, 3], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("with_weights", [True, False])
def test_steps_are_those_of_torchs_operations_bit_for_bit(with_weights: bool, first: int) -> None:
    ours, expected = (
        [
            tensors(0, first),
            [torch.zeros_like(x) for x in tensors(0)],
            [torch.zeros_like(x) for x in tensors(0)],
            [x.bfloat16() for x in tensors(0, first)] if with_weights else [],
        ]
        for _ in range(2)
    )
    for step in (1.0, 2.0, 3.0):
        grads = tensors(int(100 * step), first)
        for run, (main, *moments, weights) in ((adam_step, ours), (composite, expected)):
            run(main, grads, *moments, weights, clip=0.3, step=step, **NUMBERS)
    for our_list, expected_list in zip(ours, expected, strict=True):
        for our, value in zip(our_list, expected_list, strict=True):
            assert torch.equal(our, value)


def test_steps_are_those_of_torchs_adam() -> None:
    main = tensors(0)
    moments = [[torch.zeros_like(x) for x in main] for _ in range(2)]
    parameters = [x.clone().requires_grad_() for x in main]
    beta1, beta2 = NUMBERS["beta1"], NUMBERS["beta2"]
    others = {name: NUMBERS[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(parameters, betas=(beta1, beta2), **others)
    for step in (1.0, 2.0, 3.0):
        grads = tensors(int(100 * step))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = 0.3 * grad
        optimizer.step()
        adam_step(main, grads, *moments, [], clip=0.3, step=step, **NUMBERS)
    for ours, parameter in zip(main, parameters, strict=True):
        assert torch.allclose(ours, parameter, rtol=1e-6, atol=1e-6)


def test_the_operator() -> None:
    lists = [[draw(6, seed).abs()] for seed in range(4)]
    numbers = [0.5, *NUMBERS.values(), 2.0]
    check_operator(adam_step, (*lists, [draw(6, 4).bfloat16()], *numbers))
    adam_step([], [], [], [], [], *numbers)


def train(policy: Policy, steps: int) -> float:
    """Returns the gradients' norm of the last step."""
    batch = TrainingBatch.of(make_samples(0, count=2))
    for _ in range(steps):
        batches = pack_mini_batch(policy, batch, micro_batches_of(64), optional=(), routing=None)
        forward_backward(policy, preset("sft"), batches, temperature=1.0)
        norm = optimizer_step(policy)["grad_norm"]
    return norm


def state_of(policy: Policy) -> list[dict[str, Tensor]]:
    """Main weights and state of this rank's parameters."""
    return [
        {"param": parameter.detach()} | stepper.state[parameter]
        for stepper in torch_optimizers(policy.optimizer)
        for group in stepper.param_groups
        for parameter in group["params"]
    ]


def compare(rank: int, world_size: int, path: str, sizes: dict[str, Any], dtype: str) -> None:
    layout = parallel(**sizes)
    groups = groups_of(layout)
    section = adam(lr=1e-2, weight_decay=0.1, clip_grad=0.05)
    steps = 1 if dtype == "bfloat16" else 2  # weights that the interpreter did not round differ
    policies, norms = [], []
    for is_kernel in (True, False):
        with mock.patch.object(
            kernel_adam, "row_kernels_apply", lambda x, name, is_kernel=is_kernel: is_kernel
        ):
            policy = build_policy(
                model_config(path, dtype=dtype), layout, groups, optimizer=section
            )
        norms.append(train(policy, steps))
        policies.append(policy)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > section.clip_grad
    assert optimizer_numbers(policies[0]) == optimizer_numbers(policies[1]) == {"step": steps}
    for ours, expected in zip(*map(state_of, policies), strict=True):
        assert list(ours) == list(expected) == ["param", "step", "exp_avg", "exp_avg_sq"]
        for name, value in expected.items():
            assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-7), name
    of_kernel = policies[0]
    for stepper in torch_optimizers(of_kernel.optimizer):
        copies = stepper.weights
        assert bool(copies) is (dtype == "bfloat16")
        for group in stepper.param_groups:
            for parameter in group["params"]:
                if id(parameter) in copies:
                    weight = copies[id(parameter)]
                    assert torch.equal(weight.view(-1), cut(parameter.detach()).view(-1))
    weights, expected = (
        [value.detach().float() for chunk in policy.chunks for value in chunk.parameters()]
        for policy in policies
    )
    rounding = 2.0**-7 if dtype == "bfloat16" else 1e-5
    for ours, value in zip(weights, expected, strict=True):
        assert torch.allclose(ours, value, rtol=rounding, atol=1e-7)


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ({}, "bfloat16"),
        ({"use_distributed_optimizer": False}, "bfloat16"),
        ({"tensor": 2, "expert": 2}, "float32"),
    ],
    ids=["bfloat16", "bfloat16, not distributed", "float32, divided"],
)
def test_a_model_is_trained_as_by_megatron(
    tmp_path: Any, sizes: dict[str, Any], dtype: str
) -> None:
    """Which clips, steps and copies one after the other."""
    path = save_tiny_model(tmp_path / "model", **MODELS["moe"])
    run_distributed(compare, 2, path, sizes, dtype)
