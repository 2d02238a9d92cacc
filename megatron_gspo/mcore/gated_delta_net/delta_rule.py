"""The gated delta rule in chunks, without Megatron (Yang et al. 2024, "Gated Delta Networks",
arXiv:2412.06464).

Each head has a state S [key size, value size], which token t updates and reads:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

Within a chunk of C tokens, c_t = g_1 + ... + g_t since its start, the new values are the solution
of a unit lower triangular system,

    n_t = beta_t (v_t - exp(c_t) S_0^T k_t) - beta_t sum over s < t of exp(c_t - c_s) (k_t . k_s)
    n_s,

and the rest is matrix products. Chunks of one sequence follow each other in a loop; the sequences
of a micro-batch, and all heads, are its batch. Time and memory are linear in tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.chunk_layout import chunk_steps
from megatron_gspo.parallel.autograd_context import AutogradContext


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, active: tuple[int, ...]
) -> Tensor:
    """Outputs [chunks, heads, r, C, e] of the gated delta rule.

    ``query``, ``key`` [chunks, heads, C, d], already scaled; ``value`` [chunks, heads, r, C, e]: r
    value heads read one key head; ``gate`` (logarithm of the decay, at most 0) and ``beta``
    [chunks, heads, r, C]; all of one dtype, float32 or float64. ``active``: ``active[i]`` sequences
    have an i-th chunk. The chunks are ordered by i, then by sequence, longer sequences first. A
    position with ``gate`` and ``beta`` 0 leaves the state as it is.
    """
    decayed = gate.cumsum(-1)
    above = torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool, device=gate.device).triu(1)
    decay = (decayed.unsqueeze(-1) - decayed.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    transposed = key.transpose(-1, -2)
    since = decayed.exp().unsqueeze(-1)
    system = (key @ transposed).unsqueeze(2) * decay * beta.unsqueeze(-1)
    right = torch.cat((value, key.unsqueeze(2) * since), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, corrections = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    until_end = key.unsqueeze(2) * (decayed[..., -1:] - decayed).exp().unsqueeze(-1)
    flat = (x.flatten(0, 2) for x in (values, corrections, until_end, since[..., -1:, :]))
    new, states = _Scan.apply(
        *flat, tuple(count * gate.shape[1] * gate.shape[2] for count in active)
    )
    within = (query @ transposed).unsqueeze(2) * decay
    before = (query.unsqueeze(2) * since).flatten(0, 2)
    return torch.baddbmm(torch.bmm(before, states), within.flatten(0, 2), new).view(value.shape)


class _ScanContext(AutogradContext, Protocol):
    active: tuple[int, ...]
    """Rows of each step."""


class _Scan(torch.autograd.Function):
    """``new = values - corrections @ state`` and ``next state = decay * state + keys^T @ new``,
    chunk after chunk.

    ``values`` [n, C, e], ``corrections`` and ``keys`` [n, C, d], ``decay`` [n, 1, 1]; returns
    ``new`` [n, C, e] and the state [n, d, e] before each chunk. ``active``: rows of each step; the
    first rows go on in the next.
    """

    @staticmethod
    def forward(
        ctx: _ScanContext,
        values: Tensor,
        corrections: Tensor,
        keys: Tensor,
        decay: Tensor,
        active: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        new = torch.empty_like(values, memory_format=torch.contiguous_format)
        states = values.new_empty(values.shape[0], keys.shape[-1], values.shape[-1])
        states[: active[0]] = 0
        for start, count, following in chunk_steps(active):
            now = slice(start, start + count)
            then = slice(start + count, start + count + following)
            torch.baddbmm(values[now], corrections[now], states[now], alpha=-1, out=new[now])
            going = slice(start, start + following)
            torch.mul(states[going], decay[going], out=states[then])
            states[then].baddbmm_(keys[going].transpose(1, 2), new[going])
        ctx.active = active
        ctx.save_for_backward(corrections, keys, decay, new, states)
        return new, states

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _ScanContext, grad_new: Tensor, grad_states: Tensor
    ) -> tuple[Tensor | None, ...]:
        corrections, keys, decay, new, states = ctx.saved_tensors
        grad = torch.empty_like(new)
        after = torch.zeros_like(states)  # gradient of the state after each chunk
        for start, count, following in reversed(chunk_steps(ctx.active)):
            now = slice(start, start + count)
            then = slice(start + count, start + count + following)
            going = slice(start, start + following)
            if following:  # the next step's gradient of the state before it
                torch.mul(after[then], decay[then], out=after[going])
                after[going].add_(grad_states[then]).baddbmm_(
                    corrections[then].transpose(1, 2), grad[then], alpha=-1
                )
            torch.baddbmm(grad_new[now], keys[now], after[now], out=grad[now])
        grad_corrections = torch.bmm(grad, states.transpose(1, 2)).neg_()
        grad_keys = torch.bmm(new, after.transpose(1, 2))
        grad_decay = torch.linalg.vecdot(states.flatten(1), after.flatten(1)).view(decay.shape)
        return grad, grad_corrections, grad_keys, grad_decay, None
