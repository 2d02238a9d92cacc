"""Every rule of every family's tables."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from megatron_gspo.models import FAMILIES, Shard, family_of
from megatron_gspo.models.model_shape import DeltaNetSizes, Mamba2Sizes
from megatron_gspo.models.qwen_next import merge_gated_qkv
from tests.support.tiny_models import tiny_config


def numbered(*sizes: int, start: int) -> torch.Tensor:
    """Every element a number of its own, so that a swap of any two shows."""
    return torch.arange(start, start + math.prod(sizes), dtype=torch.float32).view(sizes)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_every_rule_gives_back_what_it_was_given(family):
    """Over the whole table, at the sizes of a small model and under its own sharding dimension."""
    sizes = DeltaNetSizes(key_heads=2, value_heads=4, key_size=2, value_size=3, kernel=4)
    shape = replace(
        family_of(tiny_config("moe").to_dict())[1],
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=2,
        delta_net=sizes,
        mamba=Mamba2Sizes(heads=4, head_size=2, groups=2, state_size=3, kernel=4),
    )
    row_counts = {
        "k_proj": 4,
        "v_proj": 4,
        "in_proj_qkvz": 32,
        "mixer.in_proj": 32,
        "in_proj_ba": 8,
        "conv1d": 20,
        "in_proj_qkv.": 20,
        "in_proj_z": 12,
        "in_proj_b.": 4,
        "in_proj_a": 4,
    }
    for rule in (*family.outer, *chain(*family.mixers.values()), *family.dense, *family.experts):
        row_counts["q_proj"] = 16 if rule.merge is merge_gated_qkv else 8
        parts = [
            numbered(
                next((count for key, count in row_counts.items() if key in name), 6),
                4,
                start=1000 * i,
            )
            for i, name in enumerate(rule.hugging_face)
        ]
        back = rule.split(rule.merge(parts, shape), shape)
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True)), rule.megatron
        assert rule.is_expert == (".experts." in f".{rule.hugging_face[0]}")
        assert len(parts) == 1 or rule.shard is Shard.ROWS, "merged tensors are stacked by rows"
