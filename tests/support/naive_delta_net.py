"""The gated delta net token by token in double precision, written from its recurrence.

Transformers computes it in float32 whatever the dtype, so that its own module can't be the oracle of a float64 one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaNetWeights:
    """Of one layer, Hugging Face layout of Qwen3.5: ``in_qkv`` [2 keys + values, h], ``in_z`` [values, h],
    ``in_b`` and ``in_a`` [value heads, h], ``filters`` [2 keys + values, kernel], ``dt_bias`` and ``log_rate``
    [value heads], ``norm`` [value size], ``out`` [h, values]."""

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


def naive_delta_rule(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    """Outputs [t, e] of one head and sequence: ``query`` and ``key`` [t, d] as they enter the rule, ``value`` [t, e],
    ``gate`` and ``beta`` [t]."""
    state = query.new_zeros(key.shape[1], value.shape[1])
    rows = []
    for q, k, v, g, b in zip(query, key, value, gate, beta, strict=True):
        state = state * torch.exp(g)
        state = state + torch.outer(k, b * (v - state.T @ k))
        rows.append(state.T @ q)
    return torch.stack(rows)


def naive_delta_net(hidden: Tensor, weights: DeltaNetWeights) -> Tensor:
    """The layer's output [t, h] for one sequence ``hidden`` [t, h]."""
    w = weights
    mixed = hidden @ w.in_qkv.T
    kernel = w.filters.shape[1]
    rows = []
    for t in range(len(mixed)):
        taps = [mixed[t - kernel + 1 + j] * w.filters[:, j] for j in range(kernel) if t - kernel + 1 + j >= 0]
        rows.append(silu(torch.stack(taps).sum(0)))
    query, key, value = torch.stack(rows).split((w.key_heads * w.key_size,) * 2 + (len(w.in_z),), dim=1)
    beta = 1 / (1 + torch.exp(-(hidden @ w.in_b.T)))
    gate = -torch.exp(w.log_rate) * torch.log1p(torch.exp(hidden @ w.in_a.T + w.dt_bias))
    z = hidden @ w.in_z.T
    size, heads = len(w.norm), len(w.dt_bias)
    outputs = []
    for head in range(heads):
        group = head // (heads // w.key_heads)
        q, k = (x[:, group * w.key_size : (group + 1) * w.key_size] for x in (query, key))
        q, k = (x / torch.sqrt((x * x).sum(1, keepdim=True) + 1e-6) for x in (q, k))
        columns = slice(head * size, (head + 1) * size)
        out = naive_delta_rule(q / math.sqrt(w.key_size), k, value[:, columns], gate[:, head], beta[:, head])
        out = out / torch.sqrt((out * out).mean(1, keepdim=True) + w.eps) * w.norm
        outputs.append(out * silu(z[:, columns]))
    return torch.cat(outputs, dim=1) @ w.out.T


def naive_packed(hidden: Tensor, weights: DeltaNetWeights, bounds: list[int]) -> Tensor:
    """``naive_delta_net`` of each sequence of a packed batch."""
    pairs = zip(bounds, bounds[1:], strict=False)
    return torch.cat([naive_delta_net(hidden[start:end], weights) for start, end in pairs])
