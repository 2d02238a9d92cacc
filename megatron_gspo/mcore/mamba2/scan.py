"""The recurrence of Mamba-2 in chunks, without Megatron (Dao and Gu 2024, "Transformers are SSMs",
arXiv:2405.21060).

Each head has a state S [state size, head size], which token t updates and reads:

    S_t = exp(g_t) S_{t-1} + b_t x_t^T,    y_t = S_t^T c_t

Within a chunk of C tokens, d_t = g_1 + ... + g_t since its start, with the state S_0 before it,

    y_t = exp(d_t) S_0^T c_t + sum over s <= t of exp(d_t - d_s) (c_t . b_s) x_s,

so that all is matrix products but the states between chunks, which follow each other in a loop over
the chunks of a sequence. Time and memory are linear in tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.chunk_layout import chunk_steps
from megatron_gspo.parallel.autograd_context import AutogradContext


def chunked_scan(x: Tensor, b: Tensor, c: Tensor, gate: Tensor, active: tuple[int, ...]) -> Tensor:
    """Outputs [chunks, groups, r, C, e] of the recurrence.

    ``x`` [chunks, groups, r, C, e]: r heads read one group's ``b`` and ``c`` [chunks, groups, C, d];
    ``gate`` [chunks, groups, r, C]: logarithm of the decay, at most 0; all of one dtype, float32 or
    float64. ``active``: ``active[i]`` sequences have an i-th chunk. The chunks are ordered by i, then
    by sequence, longer sequences first. Only a sequence's last chunk may have positions without a
    token, behind all others: their values do not matter.
    """
    decayed = gate.cumsum(-1)
    above = torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool, device=gate.device).triu(1)
    decay = (decayed.unsqueeze(-1) - decayed.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    within = (c @ b.transpose(-1, -2)).unsqueeze(2) * decay
    until_end = b.unsqueeze(2) * (decayed[..., -1:] - decayed).exp().unsqueeze(-1)
    since = decayed.exp().unsqueeze(-1)
    updates = until_end.transpose(-1, -2) @ x
    heads = gate.shape[1] * gate.shape[2]
    states = _States.apply(
        updates.flatten(0, 2),
        since[..., -1:, :].flatten(0, 2),
        tuple(count * heads for count in active),
    )
    before = (c.unsqueeze(2) * since).flatten(0, 2)
    own = torch.bmm(within.flatten(0, 2), x.flatten(0, 2))
    return torch.baddbmm(own, before, states).view(x.shape)


class _StatesContext(AutogradContext, Protocol):
    active: tuple[int, ...]
    """Rows of each step."""


class _States(torch.autograd.Function):
    """``next state = decay * state + update``, chunk after chunk.

    ``updates`` [n, d, e], ``decay`` [n, 1, 1]; returns the state [n, d, e] before each chunk, 0 before
    a first one. ``active``: rows of each step; the first rows go on in the next.
    """

    @staticmethod
    def forward(
        ctx: _StatesContext, updates: Tensor, decay: Tensor, active: tuple[int, ...]
    ) -> Tensor:
        states = torch.empty_like(updates, memory_format=torch.contiguous_format)
        states[: active[0]] = 0
        for start, count, following in chunk_steps(active):
            going = slice(start, start + following)
            then = slice(start + count, start + count + following)
            torch.addcmul(updates[going], states[going], decay[going], out=states[then])
        ctx.active = active
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: _StatesContext, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        decay, states = ctx.saved_tensors
        after = torch.zeros_like(states)  # gradient of the state after each chunk
        for start, count, following in reversed(chunk_steps(ctx.active)):
            going = slice(start, start + following)
            then = slice(start + count, start + count + following)
            torch.addcmul(grad[then], after[then], decay[then], out=after[going])
        grad_decay = torch.linalg.vecdot(states.flatten(1), after.flatten(1)).view(decay.shape)
        return after, grad_decay, None
