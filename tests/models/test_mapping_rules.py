"""Where the rows of merged tensors lie, by hand; `test_rule_tables.py` has the way back."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_gspo.models import family_of
from megatron_gspo.models.mapping_rules import (
    merge_qkv,
    merge_rows,
)
from tests.support.tiny_models import tiny_config

_, SHAPE = family_of(tiny_config("moe").to_dict())


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
