"""Sparse attention over packed sequences against loops in float64: which positions an indexer
selects, and values and gradients of the attention over them; alone and context-parallel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.mcore import indexer as indexer_module
from megatron_gspo.mcore import sparse_attention as module
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.indexer import Indexer
from megatron_gspo.mcore.sparse_attention import SparseAttention
from megatron_gspo.models import ModelShape, family_of
from megatron_gspo.parallel.context_parallel import zigzag_indices
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages
from tests.support.tiny_models import tiny_config

LENGTHS = (4, 20, 8, 36, 12)  # multiples of 2 * cp, shorter and longer than what is selected
TOPK = 6
HEADS = 3


@dataclass(frozen=True)
class Inputs:
    """Of all tokens: hidden states and the queries' latents, query, key and value, and the weight
    of each output in the loss.
    """

    hidden: Tensor
    latent: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor


def shape_of(kind: str) -> ModelShape:
    return family_of(tiny_config(kind).to_dict())[1]


def inputs(total: int) -> Inputs:
    g = torch.Generator().manual_seed(total)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    return Inputs(
        draw(total, 32),
        draw(total, 24),
        draw(total, HEADS, 8),
        draw(total, HEADS, 8),
        draw(total, HEADS, 5),
        draw(total, HEADS * 5),
    )


def bounds_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attention_of(kind: str, cp_group: Any, tp_group: Any) -> SparseAttention:
    """In float64, with weights that are the same on all ranks."""
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=HEADS,
        kv_channels=8,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
    )
    groups = SimpleNamespace(cp=cp_group, tp=tp_group)
    attention = SparseAttention(config, shape_of(kind), softmax_scale=0.3, pg_collection=groups)
    for parameter in attention.indexer.k_norm.parameters():
        parameter.data = torch.rand_like(parameter, dtype=torch.float64) + 0.5
    return attention


def turned(x: Tensor, position: int, shape: ModelShape) -> Tensor:
    """``x`` [12], of which the first 8 numbers are rotated pair by pair."""
    assert shape.indexer is not None
    out = x.clone()
    for i, frequency in enumerate(shape.rotary.frequencies().double().tolist()):
        a, b = (2 * i, 2 * i + 1) if shape.indexer.interleaved else (i, i + 4)
        cos = math.cos(position * frequency) * shape.rotary.cosine_scale
        sin = math.sin(position * frequency) * shape.rotary.cosine_scale
        out[a] = x[a] * cos - x[b] * sin
        out[b] = x[b] * cos + x[a] * sin
    return out


def selected_by_hand(indexer: Indexer, shape: ModelShape, data: Inputs) -> list[set[int]]:
    """The positions that each token attends, by loops over sequences, queries and heads."""
    chosen: list[set[int]] = []
    norm = indexer.k_norm
    start = 0
    for length in LENGTHS:
        keys = []
        for t in range(length):
            key = indexer.linear_wk.weight @ data.hidden[start + t]
            key = (key - key.mean()) / (key.var(correction=0) + norm.eps).sqrt()
            keys.append(turned(key * norm.weight + norm.bias, t, shape))
        for t in range(length):
            queries = (indexer.linear_wq_b.weight @ data.latent[start + t]).view(8, 12)
            weights = indexer.linear_weights_proj.weight @ data.hidden[start + t]
            rotated = [turned(query, t, shape) for query in queries]
            scores = [
                sum(
                    float(weight * max(float(query @ keys[past]), 0.0))
                    for weight, query in zip(weights, rotated, strict=True)
                )
                for past in range(t + 1)
            ]
            best = sorted(range(t + 1), key=lambda past: scores[past], reverse=True)
            chosen.append(set(best[:TOPK]))
        start += length
    return chosen


def attended_by_hand(chosen: list[set[int]], data: Inputs, scale: float) -> Tensor:
    outputs = []
    start = 0
    for length in LENGTHS:
        for t in range(start, start + length):
            past = [start + position for position in sorted(chosen[t])]
            scores = torch.einsum("hd,khd->hk", data.query[t], data.key[past]) * scale
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), data.value[past]))
        start += length
    return torch.stack(outputs).flatten(1)


def attended(rank: int, world_size: int, kind: str, context: int) -> dict[str, Tensor]:
    """This rank's selection, outputs and gradients; ranks beyond ``context`` are tensor-parallel.

    A tensor-parallel rank selects for its own tokens and attends for all.
    """
    cp_groups = [
        dist.new_group(list(range(i, world_size, world_size // context)))
        for i in range(world_size // context)
    ]
    tensor = world_size // context
    tp_groups = [dist.new_group(list(range(i * tensor, (i + 1) * tensor))) for i in range(context)]
    cp_group = cp_groups[rank % tensor]
    tp_group = tp_groups[rank // tensor]
    attention = attention_of(kind, cp_group, tp_group)
    data = inputs(sum(LENGTHS))
    rows = zigzag_indices(bounds_of(LENGTHS), cp_group.rank(), context)
    plan = packed_sequences(bounds_of(LENGTHS), max(LENGTHS), cp_group, torch.device("cpu"))
    own = rows.chunk(tensor)[tp_group.rank()]
    with (
        mock.patch.object(indexer_module, "_SCORE_ELEMENTS", 8 * 36 * 5),
        mock.patch.object(module, "_BLOCK_QUERIES", 7),
    ):
        selected = attention.indexer(data.hidden[own][:, None], data.latent[own][:, None], plan)
        parts = [x[rows].requires_grad_() for x in (data.query, data.key, data.value)]
        out = attention.attend_selected(*parts, sequences=plan, selected=selected)
        (out * data.weight[rows]).sum().backward()
    assert not any(p.requires_grad for p in attention.indexer.parameters())
    grads = dict(zip(("query", "key", "value"), (x.grad for x in parts), strict=True))
    return {"rows": rows, "selected": selected, "out": out.detach(), **grads}


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_dsa"])
@pytest.mark.parametrize(("world_size", "context"), [(1, 1), (4, 2)])
def test_equals_loops_over_each_sequence_alone(kind: str, world_size: int, context: int) -> None:
    ranks = run_distributed(attended, world_size, kind, context)
    data = inputs(sum(LENGTHS))
    indexer = attention_of(kind, SimpleNamespace(size=lambda: 1), None).indexer
    chosen = selected_by_hand(indexer, shape_of(kind), data)
    starts = bounds_of(LENGTHS)[:-1].repeat_interleave(torch.tensor(LENGTHS)).tolist()
    parts = [x.clone().requires_grad_() for x in (data.query, data.key, data.value)]
    copy = Inputs(data.hidden, data.latent, *parts, data.weight)
    out = attended_by_hand(chosen, copy, 0.3)
    (out * data.weight).sum().backward()
    for values in ranks:
        rows = values["rows"]
        for token, positions in zip(rows.tolist(), values["selected"].tolist(), strict=True):
            own = token - starts[token]
            assert {p for p in positions if p <= own} == chosen[token], token
        torch.testing.assert_close(values["out"], out[rows].detach())
        for name, part in zip(("query", "key", "value"), parts, strict=True):
            torch.testing.assert_close(values[name], part.grad[rows])


def alone(rank: int, world_size: int, length: int) -> tuple[bool, int, int]:
    """Whether no selection is made at the number of selected positions; peak bytes of a forward
    and a backward pass at ``length`` tokens and at twice as many."""
    group = dist.group.WORLD
    attention = attention_of("deepseek_v32", group, group).float()
    device = torch.device("cpu")
    short = packed_sequences(bounds_of((TOPK, 3)), TOPK, group, device)
    none = attention.indexer(torch.zeros(9, 1, 32), torch.zeros(9, 1, 24), short) is None
    peaks = []
    with (
        mock.patch.object(indexer_module, "_SCORE_ELEMENTS", 2**13),
        mock.patch.object(module, "_MASK_ELEMENTS", 2**13),
    ):
        for tokens in (length, 2 * length):
            data = inputs(tokens)
            plan = packed_sequences(bounds_of((tokens,)), tokens, group, device)
            parts = [x.float().requires_grad_() for x in (data.query, data.key, data.value)]
            hidden, latent = data.hidden.float()[:, None], data.latent.float()[:, None]
            with LiveStorages() as storages:
                selected = attention.indexer(hidden, latent, plan)
                attention.attend_selected(
                    *parts, sequences=plan, selected=selected
                ).sum().backward()
            peaks.append(storages.peak)
    return none, *peaks


def test_memory_is_linear_and_short_sequences_need_no_indexer() -> None:
    none, at_once, at_twice = run_distributed(alone, 1, 256)[0]
    assert none
    assert at_twice < 2.2 * at_once
