"""Norms over all tensor-parallel ranks' heads, against Transformers' and autograd in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

from megatron_gspo.mcore.joint_norms import JointNorm, joint_rms_norm
from tests.support.distributed import run_distributed

EPS = 0.1
TOKENS = 5
WIDTH = 12
ALONE = SimpleNamespace(size=lambda: 1)


def drawn(*sizes: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the gradient of the output."""
    return tuple(
        drawn(*size, seed=seed, dtype=dtype)
        for seed, size in enumerate(((TOKENS, WIDTH), (WIDTH,), (TOKENS, WIDTH)))
    )


def naive() -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of x and weight, by autograd in float64."""
    x, weight, grad = inputs()
    x.requires_grad_()
    weight.requires_grad_()
    out = x / (x.square().sum(-1, keepdim=True) / WIDTH + EPS).sqrt() * weight
    out.backward(grad)
    return out.detach(), x.grad, weight.grad


def found(dtype: torch.dtype, rows: slice = slice(None), group: Any = ALONE) -> tuple[Tensor, ...]:
    x, weight, grad = (tensor[..., rows].clone() for tensor in inputs(dtype))
    x.requires_grad_()
    weight.requires_grad_()
    out = joint_rms_norm(x, weight, EPS, group)
    out.backward(grad)
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
def test_one_rank(dtype: torch.dtype, tolerance: float) -> None:
    for tensor, expected in zip(found(dtype), naive(), strict=True):
        assert tensor.dtype is dtype
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=tolerance)


def test_equals_transformers() -> None:
    norm = MiniMaxM2RMSNorm(WIDTH, EPS)
    x, weight, _ = inputs(torch.float32)
    norm.weight.data = weight
    torch.testing.assert_close(joint_rms_norm(x, weight, EPS, ALONE), norm(x))


def _parts(rank: int, world: int) -> tuple[Tensor, ...]:
    import torch.distributed as dist

    part = WIDTH // world
    return found(torch.float64, slice(rank * part, (rank + 1) * part), dist.group.WORLD)


def test_ranks_have_parts_of_one_norm() -> None:
    """Three ranks' outputs and gradients, side by side, are those of one."""
    ranks = run_distributed(_parts, 3)
    for tensors, expected in zip(zip(*ranks, strict=True), naive(), strict=True):
        torch.testing.assert_close(torch.cat(tensors, dim=-1), expected, rtol=0, atol=1e-12)


def test_heads_share_a_mean_and_the_weight_counts_as_a_part() -> None:
    config = SimpleNamespace(
        params_dtype=torch.float64, use_cpu_initialization=True, layernorm_epsilon=EPS
    )
    norm = JointNorm(config, 3, 4, ALONE)
    assert norm.weight.tensor_model_parallel and norm.weight.partition_dim == 0
    assert not getattr(norm.weight, "sequence_parallel", False)
    x, weight, _ = inputs()
    norm.weight.data = weight
    out = norm(x.view(TOKENS, 1, 3, 4))
    assert out.shape == (TOKENS, 1, 3, 4)
    torch.testing.assert_close(out.view(TOKENS, WIDTH), naive()[0])
