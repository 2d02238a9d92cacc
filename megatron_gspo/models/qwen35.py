"""Qwen3.5 and Qwen3.6, the language model: gated delta nets and gated attention as Qwen3-Next,
dense or with experts.

The published models read images too. Their vision tower and their multi-token prediction are
carried, not trained. The three sections of their rotary embedding have one position in text, so
that it is the plain one.

Sources: transformers ``modeling_qwen3_5.py``, ``modeling_qwen3_5_moe.py`` and
``conversion_mapping.py``, and the files of the published models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.config_reader import only
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule, Shard
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.qwen_next import (
    DELTA_NET,
    GATED_ATTENTION,
    convolved_blocks,
    delta_sizes,
    gated_decoder,
    grouped,
    ungrouped,
    with_experts,
)
from megatron_gspo.models.rule_tables import (
    DENSE,
    EXPERTS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
)
from megatron_gspo.models.with_images import with_images

# Keys of published configs that Transformers does not read, with what it computes.
_FIXED: tuple[tuple[str, Any], ...] = (
    ("mamba_ssm_dtype", "float32"),
    ("mlp_only_layers", []),
    ("decoder_sparse_step", 1),
    ("norm_topk_prob", True),
)


def merge_separate(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[q k v b a z]`` for each key head of this shard from all its queries, keys and values one
    above the other, all z, all b and all a."""
    qkv, z, b, a = parts
    sizes = delta_sizes(shape)
    blocks = convolved_blocks(shape)
    heads = qkv.shape[0] * sizes.key_heads // sum(blocks)
    query, key, value = qkv.split([block * heads // sizes.key_heads for block in blocks])
    return grouped((query, key, value, b, a, z), heads)


def split_separate(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_separate``."""
    sizes = delta_sizes(shape)
    values = sizes.values_per_key * sizes.value_size
    runs = (
        sizes.key_size,
        sizes.key_size,
        values,
        sizes.values_per_key,
        sizes.values_per_key,
        values,
    )
    query, key, value, b, a, z = ungrouped(tensor, runs)
    return [torch.cat((query, key, value)), z, b, a]


def _qwen3_5(config: HFConfig) -> ModelShape:
    for key, known in (*_FIXED, ("num_experts", 0)):
        only(config, key, known)
    return gated_decoder(config)


def _qwen3_5_moe(config: HFConfig) -> ModelShape:
    for key, known in _FIXED:
        only(config, key, known)
    # no layer is dense: Megatron's width of those, which nothing has
    whole = {**config, "intermediate_size": config["moe_intermediate_size"], "norm_topk_prob": True}
    return with_experts(gated_decoder(whole), whole)


# The published Qwen3.5 has decay rates and the norm behind the delta rule in float32, Qwen3.6 in
# bfloat16.
_DELTA_NET = tuple(
    replace(rule, keeps_float32=rule.megatron[0].endswith((".A_log", ".out_norm.weight")))
    for rule in DELTA_NET
) + (
    Rule(
        ("self_attention.in_proj.weight",),
        tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        Shard.ROWS,
        merge_separate,
        split_separate,
        blocks=convolved_blocks,
    ),
)
_MIXERS = {"attention": GATED_ATTENTION, "gated_delta_net": _DELTA_NET}
# What names begin with in a whole model's files and in the language model alone.
_ALONE = (("model.language_model.", "model."),)
_DENSE_TEXT = Family("qwen3_5_text", _qwen3_5, _MIXERS, DENSE, in_transformers=_ALONE)
_MOE_TEXT = Family(
    "qwen3_5_moe_text",
    _qwen3_5_moe,
    _MIXERS,
    DENSE,
    EXPERTS + SHARED_EXPERT,
    in_transformers=_ALONE,
)


_IN_WHOLE = {"model.": "model.language_model."}
QWEN35 = (
    _DENSE_TEXT,
    with_images(_DENSE_TEXT, "qwen3_5", starts=_IN_WHOLE, carried=("model.visual.",)),
    _MOE_TEXT,
    with_images(
        _MOE_TEXT,
        "qwen3_5_moe",
        starts=_IN_WHOLE,
        carried=("model.visual.",),
        experts=STACKED_EXPERTS + SHARED_EXPERT,
    ),
)
