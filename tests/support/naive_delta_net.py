"""The gated delta net token by token in double precision, written from its recurrence.

Transformers computes it in float32 whatever the dtype, so that its own module can't be the oracle
of a float64 one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaNetWeights:
    """Of one layer, Hugging Face layout of Qwen3.5: ``in_qkv`` [2 keys + values, h], ``in_z``
    [values, h], ``in_b`` and ``in_a`` [value heads, h], ``filters`` [2 keys + values, kernel],
    ``dt_bias`` and ``log_rate`` [value heads], ``norm`` [value size], ``out`` [h, values]."""

    in_qkv: Tensor
    in_z: Tensor
    in_b: Tensor
    in_a: Tensor
    filters: Tensor
    dt_bias: Tensor
    log_rate: Tensor
    norm: Tensor
    out: Tensor
    key_size: int
    key_heads: int
    eps: float = 1e-6


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def naive_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor
) -> Tensor:
    """Outputs [t, heads, e] of one sequence: ``query`` and ``key`` [t, heads, d] as they enter the
    rule, ``value`` [t, heads, e], ``gate`` and ``beta`` [t, heads]."""
    state = query.new_zeros(key.shape[1], key.shape[2], value.shape[2])
    rows = []
    for q, k, v, g, b in zip(query, key, value, gate, beta, strict=True):
        state = state * torch.exp(g)[:, None, None]
        known = torch.einsum("hde,hd->he", state, k)
        state = state + torch.einsum("hd,he->hde", k, b[:, None] * (v - known))
        rows.append(torch.einsum("hde,hd->he", state, q))
    return torch.stack(rows)


def naive_delta_net(hidden: Tensor, weights: DeltaNetWeights) -> Tensor:
    """The layer's output [t, h] for one sequence ``hidden`` [t, h]."""
    w = weights
    mixed = hidden @ w.in_qkv.T
    kernel = w.filters.shape[1]
    rows = []
    for t in range(len(mixed)):
        taps = [
            mixed[t - kernel + 1 + j] * w.filters[:, j]
            for j in range(kernel)
            if t - kernel + 1 + j >= 0
        ]
        rows.append(silu(torch.stack(taps).sum(0)))
    query, key, value = torch.stack(rows).split(
        (w.key_heads * w.key_size,) * 2 + (len(w.in_z),), dim=1
    )
    beta = 1 / (1 + torch.exp(-(hidden @ w.in_b.T)))
    gate = -torch.exp(w.log_rate) * torch.log1p(torch.exp(hidden @ w.in_a.T + w.dt_bias))
    z = hidden @ w.in_z.T
    heads = len(w.dt_bias)
    groups = [head // (heads // w.key_heads) for head in range(heads)]
    q, k = (x.view(len(x), w.key_heads, w.key_size)[:, groups] for x in (query, key))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    values = value.reshape(len(value), heads, -1)
    out = naive_delta_rule(q / math.sqrt(w.key_size), k, values, gate, beta)
    out = out / torch.sqrt((out * out).mean(-1, keepdim=True) + w.eps) * w.norm
    return (out * silu(z.view_as(out))).flatten(1) @ w.out.T


def naive_packed(hidden: Tensor, weights: DeltaNetWeights, bounds: list[int]) -> Tensor:
    """``naive_delta_net`` of each sequence of a packed batch."""
    pairs = zip(bounds, bounds[1:], strict=False)
    return torch.cat([naive_delta_net(hidden[start:end], weights) for start, end in pairs])
