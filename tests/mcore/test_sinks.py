"""Attention with sinks by a kernel's output and log-sum-exps, against the softmax with one more
column.

``test_attention.py`` compares whole layers with loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gspo.mcore.sinks import sink_attention, with_sink_dimension, with_sink_key


class FlashOfCpu:
    """Torch's causal flash attention for CPUs, over one sequence [t, heads, d]."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, None]:
        batch = [x.transpose(0, 1)[None] for x in inputs]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, True)
        return out[0].transpose(0, 1), lse[0].view(inputs[0].shape[1], -1), None

    def backward(
        self, grad: Tensor, inputs: Any, out: Tensor, lse: Tensor, state: None
    ) -> tuple[Tensor, ...]:
        batch = [x.transpose(0, 1)[None].contiguous() for x in (grad, *inputs, out)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *batch, lse[None], 0.0, True
        )
        return tuple(x[0].transpose(0, 1) for x in found)


def draw(*sizes: int, seed: int) -> Tensor:
    return torch.randn(
        *sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def naive(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """All scores, and the softmax over them and the sink."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    column = sinks[:, None, None].expand(-1, len(query), 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value)


def test_a_kernels_backward_gives_the_gradients_with_sinks():
    """Also under a sink that takes nearly all of the softmax, and one that takes nearly nothing."""
    inputs = [draw(9, 3, 4, seed=seed) for seed in range(3)]
    sinks = torch.tensor([0.3, 6.0, -20.0], dtype=torch.float64, requires_grad=True)
    weights = draw(9, 3, 4, seed=5).detach()
    expected = naive(*inputs, sinks)
    found = sink_attention(*inputs, sinks, FlashOfCpu())
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)
    both = [
        torch.autograd.grad((out * weights).sum(), [*inputs, sinks]) for out in (found, expected)
    ]
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(*both, strict=True))


def test_the_sink_key_has_the_sinks_score_and_no_value():
    query, key, value = (draw(2, 4, 3, seed=seed).detach() for seed in range(3))
    sinks = torch.tensor([0.3, 6.0, -2.0, 1.0], dtype=torch.float64)
    wide, keys = with_sink_dimension(query, key, sinks / 0.5)
    assert torch.equal(
        torch.einsum("qhd,khd->hqk", wide, keys), torch.einsum("qhd,khd->hqk", query, key)
    )
    batch = [x.transpose(0, 1)[None] for x in (wide, keys, value)]
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    keys, values, mask = with_sink_key(*batch[1:], mask)
    scores = 0.5 * batch[0] @ keys.transpose(2, 3)
    assert torch.allclose(scores[0, :, :, 0], sinks[:, None].expand(4, 2), atol=1e-15, rtol=0)
    assert not values[:, :, 0].any() and mask.tolist() == [
        [[[True, True, False], [True, True, True]]]
    ]
