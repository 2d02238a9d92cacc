"""Packed attention against one sequence at a time in float64: values and gradients, alone and
context-parallel.

Each way to compute it is tried: padded batches, masks in blocks, and the variable-length kernel,
which is emulated by loops here (``tests/gpu`` has the real one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.mcore import attention as module
from megatron_gspo.mcore.attention import (
    PackedAttention,
    packed_sequences,
    segments_of,
)
from megatron_gspo.models.rotary import Rotary
from megatron_gspo.parallel.context_parallel import zigzag_indices
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int
    groups: int
    dim: int = 8
    value_dim: int = 8
    scale: float | None = None
    rotary_base: float | None = None
    window: int | None = None
    sinks: bool = False


# lengths that are multiples of 4 = 2 * cp; the single-rank cases also take any
EVEN = [
    Case((8,), 4, 2),
    Case((4, 20, 8, 8, 12, 4, 36), 4, 2, rotary_base=100.0),
    Case((40, 4), 6, 1, scale=0.3),
    Case((12, 16, 12), 2, 2, dim=12, value_dim=5),
    Case((16, 4), 2, 1, dim=4, value_dim=10, rotary_base=10.0),
    Case((4, 20, 24, 8, 36), 4, 2, window=5),
    Case((20, 36), 2, 1, window=14),  # longer than the part of a sequence that one of two ranks has
    Case((4, 20, 24, 8, 36), 4, 2, sinks=True, rotary_base=100.0),
    Case((40, 8, 44), 4, 2, dim=12, value_dim=4, window=3, sinks=True, scale=0.3),
]
UNEVEN = [
    Case((1, 3, 7, 2, 5, 5, 1, 30), 4, 2, rotary_base=100.0),
    Case((9,), 3, 3),
    Case((1,), 2, 1),
    Case((1, 3, 9, 30, 2), 4, 2, window=1),
    Case((1, 70, 75, 2), 2, 1, window=4, sinks=True),
]
PATHS = ("padded", "blocks", "varlen")


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, the weight of each output in the loss, and cu_seqlens."""
    g = torch.Generator().manual_seed(sum(case.lengths))
    total = sum(case.lengths)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    return (
        draw(total, case.heads, case.dim),
        draw(total, case.groups, case.dim),
        draw(total, case.groups, case.value_dim),
        draw(total, case.heads * case.value_dim),
        bounds_of(case.lengths),
    )


def bounds_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def turned(x: Tensor, position: int, base: float | None) -> Tensor:
    """``x`` [..., d] as pairs (i, i + d / 2), each turned by ``position / base ** (2 i / d)``."""
    if base is None:
        return x
    half = x.shape[-1] // 2
    angles = torch.tensor(
        [position / base ** (2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64
    )
    cos = angles.cos()
    sin = angles.sin()
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def sinks_of(case: Case) -> Tensor | None:
    """Of about the size of the scores, another for each head."""
    return torch.linspace(-1.0, 2.0, case.heads, dtype=torch.float64) if case.sinks else None


def naive(
    case: Case, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, sinks: Tensor | None
) -> Tensor:
    """Causal attention as loops over sequences, heads and positions; ``[T, heads * value_dim]``."""
    scale = case.scale or 1 / math.sqrt(case.dim)
    outputs = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        q, k = (
            torch.stack([turned(x[t], t - start, case.rotary_base) for t in range(start, end)])
            for x in (query, key)
        )
        for position in range(end - start):
            heads = []
            for head in range(case.heads):
                group = head // (case.heads // case.groups)
                first = 0 if case.window is None else max(position + 1 - case.window, 0)
                keys = k[first : position + 1, group]
                values = value[start + first : start + position + 1, group]
                exponentials = (scale * (keys @ q[position, head])).exp()
                total = exponentials.sum() + (0.0 if sinks is None else sinks[head].exp())
                heads.append(exponentials / total @ values)
            outputs.append(torch.cat(heads))
    return torch.stack(outputs)


@dataclass(frozen=True)
class NaiveKernel:
    """Torch's variable-length kernel as loops.

    Its causal mask, and its window, end at the last query and key.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    scale: float
    window: tuple[int, int]

    def scores(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Of each segment: its rows, its keys, and the scores [heads, queries, keys]."""
        assert (self.cu_seq_q.dtype, self.cu_seq_k.dtype) == (torch.int32, torch.int32)
        assert query.shape[2] == key.shape[2] and query.shape[2] % 8 == 0
        assert (int(self.cu_seq_q.diff().max()), int(self.cu_seq_k.diff().max())) == (
            self.max_q,
            self.max_k,
        )
        assert (int(self.cu_seq_q[-1]), int(self.cu_seq_k[-1])) == (len(query), len(key))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        before, after = self.window
        assert after == 0
        for i in range(len(self.cu_seq_q) - 1):
            rows = slice(self.cu_seq_q[i], self.cu_seq_q[i + 1])
            columns = slice(self.cu_seq_k[i], self.cu_seq_k[i + 1])
            scores = self.scale * torch.einsum("qhd,khd->hqk", query[rows], key[columns])
            ahead = scores.shape[2] - scores.shape[1]
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + ahead)
            if before >= 0:
                hidden |= torch.ones_like(hidden).tril(ahead - before - 1)
            yield rows, columns, scores.masked_fill(hidden, -math.inf)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output [t, heads, d] and the log-sum-exps [heads, t]."""
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        out = []
        lse = []
        for _, columns, scores in self.scores(query, key):
            lse.append(scores.logsumexp(-1))
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[columns]))
        return torch.cat(out), torch.cat(lse, dim=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        return *self.attention(query, key, value), None

    def backward(
        self, grad: Tensor, inputs: Any, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, ...]:
        """As in FlashAttention (Dao et al., arXiv:2205.14135, algorithm 4): from the output and
        the log-sum-exps.
        """
        query, key, value = inputs
        ratio = query.shape[1] // key.shape[1]
        grad_query = torch.zeros_like(query)
        grads = [x.repeat_interleave(ratio, 1).zero_() for x in (key, value)]
        wide_key, wide_value = (x.repeat_interleave(ratio, 1) for x in (key, value))
        for rows, columns, scores in self.scores(query, key):
            weights = (scores - lse[:, rows, None]).exp()
            grads[1][columns] += torch.einsum("hqk,qhd->khd", weights, grad[rows])
            inner = (grad[rows] * out[rows]).sum(-1).t()[..., None]
            of_scores = (
                weights
                * (torch.einsum("qhd,khd->hqk", grad[rows], wide_value[columns]) - inner)
                * self.scale
            )
            grad_query[rows] += torch.einsum("hqk,khd->qhd", of_scores, wide_key[columns])
            grads[0][columns] += torch.einsum("hqk,qhd->khd", of_scores, query[rows])
        return grad_query, *(x.unflatten(1, (-1, ratio)).sum(2) for x in grads)


def naive_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lengths: Any,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` as loops."""
    assert query.shape[2] == value.shape[2]
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return NaiveKernel(*lengths, scale, window_size).attention(query, key, value)[0]


def attention_of(case: Case, group: Any) -> PackedAttention:
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=case.dim)
    attention = PackedAttention(
        config, 1, None, "self", softmax_scale=case.scale, pg_collection=SimpleNamespace(cp=group)
    )
    attention.window = case.window
    attention.rotary = None if case.rotary_base is None else Rotary(case.rotary_base, case.dim)
    return attention


def run(case: Case, group: Any) -> dict[str, float]:
    """Largest differences of this rank's output and gradients from the naive ones."""
    *tensors, weight, bounds = inputs(case)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    sinks = sinks_of(case)
    attention = attention_of(case, group)
    if sinks is not None:
        attention.sinks = sinks.clone().requires_grad_()
        sinks.requires_grad_()
    expected = naive(case, *whole, bounds, sinks)
    (expected * weight).sum().backward()

    own_tokens = zigzag_indices(bounds, group.rank(), group.size())
    local = [tensor[own_tokens].clone().requires_grad_() for tensor in tensors]
    sequences = packed_sequences(bounds, max(case.lengths), group, CPU)
    output = attention(*local, packed_seq_params=sequences)
    (output * weight[own_tokens]).sum().backward()
    errors = {"output": output - expected[own_tokens]}
    for name, ours, theirs in zip(("query", "key", "value"), local, whole, strict=True):
        errors[name] = ours.grad - theirs.grad[own_tokens]
    if sinks is not None:
        dist.all_reduce(attention.sinks.grad, group=group) if group.size() > 1 else None
        errors["sinks"] = attention.sinks.grad - sinks.grad
    return {name: float(error.abs().max()) for name, error in errors.items()}


def run_path(path: str, case: Case, group: Any) -> dict[str, float]:
    kernel = mock.Mock(side_effect=naive_varlen)
    with (
        mock.patch.object(module, "takes_varlen", lambda *kinds: path == "varlen"),
        mock.patch.object(
            module, "_MASK_ELEMENTS", 64 if path == "blocks" else module._MASK_ELEMENTS
        ),
        mock.patch("torch.nn.attention.varlen.varlen_attn", kernel),
        mock.patch.object(module, "VarlenKernel", NaiveKernel),
    ):
        errors = run(case, group)
    assert kernel.call_count == (path == "varlen" and not case.sinks)
    return errors


def run_all(rank: int, world_size: int) -> dict[tuple[str, Case, int], dict[str, float]]:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    outcomes = {
        (path, case, 2): run_path(path, case, dist.group.WORLD) for path in PATHS for case in EVEN
    }
    return outcomes | {
        (path, case, 1): run_path(path, case, alone) for path in PATHS for case in EVEN + UNEVEN
    }


def test_equals_attention_of_each_sequence_alone():
    for outcomes in run_distributed(run_all, 2):
        assert len(outcomes) == len(PATHS) * (2 * len(EVEN) + len(UNEVEN))
        for (path, case, cp), errors in outcomes.items():
            for name, error in errors.items():
                # rotary angles are float32
                bound = 1e-12 if case.rotary_base is None else 1e-5
                assert error < bound, (
                    f"{name} of {case}, {path}, context parallelism {cp}: off by {error:.1e}"
                )


def test_a_length_that_the_context_ranks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="not a multiple of 2 \\* cp_size = 4"):
        segments_of(bounds_of((8, 6)), 0, 2)


def peak_of_blocks(length: int, **facts: Any) -> int:
    """Most bytes held in forward and backward of a context rank's padded attention."""
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    sequences = packed_sequences(bounds_of((length,)), length, group, CPU)
    attention = attention_of(Case((length,), 2, 1, **facts), group)
    query = torch.randn(length // 2, 2, 8, requires_grad=True)
    key, value = (
        torch.randn(len(sequences.segments.key_source), 1, 8, requires_grad=True) for _ in range(2)
    )
    with mock.patch.object(module, "_MASK_ELEMENTS", 2**14), LiveStorages() as watch:
        attention._padded(sequences, query, key, value).sum().backward()
    return watch.peak


@pytest.mark.parametrize("facts", [{}, {"window": 32}], ids=["all keys", "a window"])
def test_memory_of_context_parallel_attention_is_linear_in_tokens(facts):
    """Masks have a bounded size, and the backward computes them again."""
    peak = peak_of_blocks(1024, **facts)
    assert peak < 512 * 1024, "one mask of all queries, with a byte per element"
    assert peak_of_blocks(2048, **facts) < 2 * peak


def test_wrong_use_is_refused():
    config = SimpleNamespace(attention_dropout=0.1, kv_channels=8)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    config.attention_dropout = 0.0
    attention = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    with pytest.raises(TypeError, match="packed_sequences"):
        attention(
            torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), packed_seq_params=None
        )
