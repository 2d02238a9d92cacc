"""Packed attention against one sequence at a time in float64: values and gradients, alone and context-parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.mcore.attention import PackedAttention, packed_sequences
from megatron_gspo.parallel.context_parallel import zigzag_indices
from tests.support.distributed import run_distributed


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int
    groups: int
    dim: int = 8
    scale: float | None = None


# lengths that are multiples of 4 = 2 * cp; the single-rank cases also take any
EVEN = [
    Case((8,), 4, 2),
    Case((4, 20, 8, 8, 12, 4, 36), 4, 2),
    Case((40, 4), 6, 1, scale=0.3),
    Case((12, 16, 12), 2, 2),
]
UNEVEN = [Case((1, 3, 7, 2, 5, 5, 1, 30), 4, 2), Case((9,), 3, 3), Case((1,), 2, 1)]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, the weight of each output in the loss, and cu_seqlens."""
    g = torch.Generator().manual_seed(sum(case.lengths))
    total = sum(case.lengths)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    bounds = torch.tensor([0, *case.lengths]).cumsum(0).int()
    return (draw(total, case.heads, case.dim), draw(total, case.groups, case.dim), draw(total, case.groups, case.dim),
            draw(total, case.heads * case.dim), bounds)


def naive(case: Case, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Causal attention as loops over sequences, heads and positions; ``[T, heads * dim]``."""
    scale = case.scale or 1 / math.sqrt(case.dim)
    rows = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        for position in range(start, end):
            heads = []
            for head in range(case.heads):
                group = head // (case.heads // case.groups)
                keys, values = key[start : position + 1, group], value[start : position + 1, group]
                weights = torch.softmax(scale * (keys @ query[position, head]), dim=0)
                heads.append(weights @ values)
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def run(case: Case, group: Any) -> dict[str, float]:
    """Largest differences of this rank's output and gradients from the naive ones."""
    *tensors, weight, bounds = inputs(case)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = naive(case, *whole, bounds)
    (expected * weight).sum().backward()

    mine = zigzag_indices(bounds, group.rank(), group.size())
    local = [tensor[mine].clone().requires_grad_() for tensor in tensors]
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=case.dim)
    groups = SimpleNamespace(cp=group)
    attention = PackedAttention(config, 1, None, "self", softmax_scale=case.scale, pg_collection=groups)
    sequences = packed_sequences(bounds, max(case.lengths), group, torch.device("cpu"))
    found = attention(*local, packed_seq_params=sequences)
    (found * weight[mine]).sum().backward()
    errors = {"output": found - expected[mine]}
    for name, ours, theirs in zip(("query", "key", "value"), local, whole, strict=True):
        errors[name] = ours.grad - theirs.grad[mine]
    return {name: float(error.abs().max()) for name, error in errors.items()}


def run_all(rank: int, world_size: int) -> dict[tuple[Case, int], dict[str, float]]:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    found = {(case, 2): run(case, dist.group.WORLD) for case in EVEN}
    return found | {(case, 1): run(case, alone) for case in EVEN + UNEVEN}


def test_equals_attention_of_each_sequence_alone():
    for found in run_distributed(run_all, 2, timeout=60):
        assert len(found) == 2 * len(EVEN) + len(UNEVEN)
        for (case, cp), errors in found.items():
            for name, error in errors.items():
                assert error < 1e-12, f"{name} of {case}, context parallelism {cp}: off by {error:.1e}"


def test_wrong_use_is_refused():
    config = SimpleNamespace(attention_dropout=0.1, kv_channels=8)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    config.attention_dropout = 0.0
    attention = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    with pytest.raises(TypeError, match="packed_sequences"):
        attention(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), packed_seq_params=None)
