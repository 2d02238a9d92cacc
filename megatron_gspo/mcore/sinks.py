"""Attention sinks: one more column in each head's softmax, with a learned score and no value
(gpt-oss).

``softmax([scores, sink])`` without its last column. With ``lse`` the log-sum-exp of the scores,
that is the attention without sinks times ``exp(lse - logaddexp(lse, sink))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.parallel.autograd_context import AutogradContext


def with_sink_dimension(query: Tensor, key: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``query`` [t, heads, d] with its head's sink, divided by the softmax's scale, as dimension d
    + 1, and ``key`` [t, groups, d] with 0 there: the scores stay, and a key of 1 in this dimension
    (`with_sink_key`) has the sink's.
    """
    return torch.cat(
        (query, sinks.to(query.dtype).expand(query.shape[0], -1)[..., None]), -1
    ), F.pad(key, (0, 1))


def with_sink_key(
    key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``key``, ``value`` [rows, groups, keys, d] and ``mask`` [rows, 1, queries, keys] with the
    sinks as a first key, which every query attends and which has no value. The sinks' dimension is
    the last that queries have, d - 1.
    """
    sink = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    sink[..., -1] = 1.0
    mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    return torch.cat((sink, key), dim=2), F.pad(value, (0, 0, 1, 0)), mask


class AttentionKernel(Protocol):
    """A flash attention; the log-sum-exps of its scores, ``lse``, are float32 [heads, t]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output [t, heads, d], ``lse``, and the state of the random numbers, which
        the backward takes."""

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the inputs by the probabilities ``exp(score - lse)`` and the output
        ``out``.
        """


@dataclass(frozen=True)
class VarlenKernel:
    """Torch's variable-length kernel for CUDA.

    window: keys before and after a query's own, -1: all.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    scale: float
    window: tuple[int, int]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.torch_attn._varlen_attn(
            query,
            key,
            value,
            *self._lengths,
            scale=self.scale,
            window_size=list(self.window),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_seq_q, cu_seq_k, max_q, max_k, is_causal = self._lengths
        return torch.ops.torch_attn._varlen_attn_backward(
            grad,
            *inputs,
            out,
            lse,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            is_causal,
            state,
            scale=self.scale,
            window_size=list(self.window),
        )

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int, bool]:
        return self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k, self.window == (-1, 0)


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: AttentionKernel
) -> Tensor:
    """The kernel's attention with ``sinks`` [heads]; [t, heads, d].

    Kernels have no gradient for their log-sum-exp. None is needed: their backward forms the
    probabilities from the log-sum-exp and the softmax's inner product from the output. Given both
    with the sink, it is the one with the sink.
    """
    return _SinkAttention.apply(query, key, value, sinks, kernel)


class _SinkContext(AutogradContext, Protocol):
    kernel: AttentionKernel
    state: Tensor


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SinkContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        kernel: AttentionKernel,
    ) -> Tensor:
        out, lse, state = kernel.forward(query, key, value)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = (out * (lse - total).exp().t()[..., None]).to(out.dtype)
        ctx.kernel = kernel
        ctx.state = state
        ctx.save_for_backward(query, key, value, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _SinkContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total = ctx.saved_tensors
        inputs = (query, key, value)
        grads = ctx.kernel.backward(grad.contiguous(), inputs, out, total, ctx.state)
        share = (sinks.to(total.dtype)[:, None] - total).exp()  # of the sink, [heads, t]
        inner = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1).t()
        return *grads, -(share * inner).sum(1).to(sinks.dtype), None
