"""The rules of a family: merge and split undo each other, and sharded slices merge to the shard
of the whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.models import family_of
from megatron_gspo.models.mapping_rules import (
    merge_alternating,
    merge_qkv,
    merge_rows,
    merge_transposed,
    split_alternating,
    split_qkv,
    split_transposed,
    split_two,
)
from tests.support.tiny_models import tiny_config

_, SHAPE = family_of(tiny_config("moe").to_dict())
SIZES = dict(
    groups=st.integers(1, 6), heads_per_group=st.integers(1, 5), head_dim=st.integers(1, 6)
)


def numbered(*sizes: int, start: int = 0) -> torch.Tensor:
    """Every element a number of its own, so that a swap of any two shows."""
    count = int(torch.tensor(sizes).prod())
    return torch.arange(start, start + count, dtype=torch.float32).view(sizes)


def test_qkv_rows_lie_group_by_group():
    shape = replace(SHAPE, num_attention_heads=4, num_query_groups=2, head_dim=1)
    query = torch.tensor([[1.0], [2], [3], [4]])
    key = torch.tensor([[10.0], [20]])
    value = torch.tensor([[100.0], [200]])
    merged = merge_qkv((query, key, value), shape)
    assert merged.flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_gate_lies_above_up():
    assert merge_rows((torch.tensor([[1.0]]), torch.tensor([[2.0]])), SHAPE).flatten().tolist() == [
        1,
        2,
    ]


def test_alternating_outputs_become_gate_above_up():
    """Three inputs, and outputs g0 u0 g1 u1; the parameter has a row for each output."""
    stored = torch.tensor([[1.0, 10, 2, 20], [3, 30, 4, 40], [5, 50, 6, 60]])
    merged = merge_alternating((stored,), SHAPE)
    assert merged.tolist() == [[1, 3, 5], [2, 4, 6], [10, 30, 50], [20, 40, 60]]
    assert torch.equal(split_alternating(merged, SHAPE)[0], stored)
    bias = merge_alternating((stored[0],), SHAPE)
    assert bias.tolist() == [1, 2, 10, 20] and torch.equal(
        split_alternating(bias, SHAPE)[0], stored[0]
    )
    halves = [merge_alternating((stored[:, half],), SHAPE) for half in (slice(0, 2), slice(2, 4))]
    assert [half.tolist() for half in halves] == [
        [[1, 3, 5], [10, 30, 50]],
        [[2, 4, 6], [20, 40, 60]],
    ]


def test_a_transposed_matrix_has_its_inputs_as_rows():
    stored = numbered(3, 2)
    assert merge_transposed((stored,), SHAPE).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert torch.equal(split_transposed(merge_transposed((stored,), SHAPE), SHAPE)[0], stored)


@settings(deadline=None, max_examples=60)
@given(**SIZES, columns=st.integers(1, 5))
def test_qkv_split_undoes_merge_and_merge_split(groups, heads_per_group, head_dim, columns):
    heads = groups * heads_per_group
    shape = replace(SHAPE, num_attention_heads=heads, num_query_groups=groups, head_dim=head_dim)
    rows = [heads * head_dim, groups * head_dim, groups * head_dim]
    parts = [numbered(count, columns, start=1000 * i) for i, count in enumerate(rows)]
    merged = merge_qkv(parts, shape)
    assert merged.shape == (sum(rows), columns)
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(merged, shape), parts, strict=True))
    assert torch.equal(merge_qkv(split_qkv(merged, shape), shape), merged)


@settings(deadline=None, max_examples=40)
@given(
    tensor=st.sampled_from([1, 2, 3]),
    groups_per_rank=st.integers(1, 3),
    heads_per_group=st.integers(1, 4),
)
def test_shards_of_qkv_are_consecutive_rows_of_the_whole(tensor, groups_per_rank, heads_per_group):
    """What lets a rank read slices of q, k and v alone: merging its slices gives its rows of
    the merged whole.
    """
    groups = tensor * groups_per_rank
    heads = groups * heads_per_group
    dim = 2
    shape = replace(SHAPE, num_attention_heads=heads, num_query_groups=groups, head_dim=dim)
    parts = [
        numbered(count * dim, 3, start=1000 * i) for i, count in enumerate((heads, groups, groups))
    ]
    shards = [
        merge_qkv([part.chunk(tensor)[rank] for part in parts], shape) for rank in range(tensor)
    ]
    assert torch.equal(torch.cat(shards), merge_qkv(parts, shape))


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 8), columns=st.integers(1, 4))
def test_gate_up_split_undoes_merge(rows, columns):
    parts = [numbered(rows, columns), numbered(rows, columns, start=1000)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(split_two(merge_rows(parts, SHAPE), SHAPE), parts, strict=True)
    )
