"""Qwen3-Next: gated delta nets, and at every fourth layer attention with a gate.

Source: transformers ``modeling_qwen3_next.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.config_reader import decoder, only, rotary_of, rotated_dims
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule, Shard
from megatron_gspo.models.model_shape import DeltaNetSizes, ModelError, ModelShape
from megatron_gspo.models.qwen import shared_size, softmax_experts
from megatron_gspo.models.rule_tables import (
    ATTENTION,
    DENSE,
    EXPERTS,
    QUERY_KEY_NORMS,
    SHARED_EXPERT,
)

_MIXERS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}


def delta_sizes(shape: ModelShape) -> DeltaNetSizes:
    """The sizes that a model with gated delta nets has."""
    assert shape.delta_net is not None
    return shape.delta_net


def grouped(parts: Sequence[Tensor], heads: int) -> Tensor:
    """The rows of each part cut into ``heads`` equal runs, and all parts' runs of one head next
    to each other.
    """
    runs = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(runs, dim=1).flatten(0, 1)


def ungrouped(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of ``grouped`` for runs of ``sizes`` rows."""
    heads = tensor.reshape(-1, sum(sizes), *tensor.shape[1:])
    return [part.flatten(0, 1) for part in heads.split(list(sizes), dim=1)]


def merge_gated_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[q ... q gate ... gate k v]`` for each query group of this shard; query rows alternate with
    their gate's, head by head."""
    both, key, value = parts
    query, gate = ungrouped(both, (shape.head_dim, shape.head_dim))
    return grouped((query, gate, key, value), key.shape[0] // shape.head_dim)


def split_gated_qkv(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_gated_qkv``."""
    rows = shape.num_attention_heads // shape.num_query_groups * shape.head_dim
    query, gate, key, value = ungrouped(tensor, (rows, rows, shape.head_dim, shape.head_dim))
    return [grouped((query, gate), query.shape[0] // shape.head_dim), key, value]


def merge_projection(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[q k v b a z]`` for each key head of this shard from ``[q k v z]`` and ``[b a]`` for
    each.
    """
    sizes = delta_sizes(shape)
    gate = sizes.projected - sizes.exchanged
    inputs, z = ungrouped(parts[0], (sizes.convolved, gate))
    return grouped((inputs, parts[1], z), inputs.shape[0] // sizes.convolved)


def split_projection(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_projection``."""
    sizes = delta_sizes(shape)
    runs = (sizes.convolved, 2 * sizes.values_per_key, sizes.projected - sizes.exchanged)
    inputs, rates, z = ungrouped(tensor, runs)
    return [grouped((inputs, z), inputs.shape[0] // sizes.convolved), rates]


def convolved_blocks(shape: ModelShape) -> tuple[int, ...]:
    """Rows of all queries, all keys and all values."""
    sizes = delta_sizes(shape)
    keys = sizes.key_heads * sizes.key_size
    return keys, keys, sizes.value_heads * sizes.value_size


def merge_filters(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[q k v]`` for each key head of this shard from all queries, keys and values."""
    sizes = delta_sizes(shape)
    blocks = convolved_blocks(shape)
    heads = parts[0].shape[0] * sizes.key_heads // sum(blocks)
    return grouped(parts[0].split([block * heads // sizes.key_heads for block in blocks]), heads)


def split_filters(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_filters``."""
    sizes = delta_sizes(shape)
    runs = (sizes.key_size, sizes.key_size, sizes.values_per_key * sizes.value_size)
    return [torch.cat(ungrouped(tensor, runs))]


def _with_gate(rule: Rule) -> Rule:
    """The rule of attention with a gate, whose rows are among those of queries, keys and values."""
    if "linear_qkv.weight" not in rule.megatron[0]:
        return rule
    return replace(rule, merge=merge_gated_qkv, split=split_gated_qkv)


GATED_ATTENTION = tuple(_with_gate(rule) for rule in ATTENTION + QUERY_KEY_NORMS)
_PROJECTION = Rule(
    ("self_attention.in_proj.weight",),
    ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    Shard.ROWS,
    merge_projection,
    split_projection,
)
DELTA_NET = (  # all but the projection
    Rule(("input_layernorm.weight",), ("input_layernorm.weight",)),
    Rule(
        ("self_attention.conv1d.weight",),
        ("linear_attn.conv1d.weight",),
        Shard.ROWS,
        merge_filters,
        split_filters,
        blocks=convolved_blocks,
    ),
    Rule(("self_attention.dt_bias",), ("linear_attn.dt_bias",), Shard.ROWS),
    Rule(("self_attention.A_log",), ("linear_attn.A_log",), Shard.ROWS),
    Rule(("self_attention.out_norm.weight",), ("linear_attn.norm.weight",)),
    Rule(("self_attention.out_proj.weight",), ("linear_attn.out_proj.weight",), Shard.COLUMNS),
)


def gated_decoder(config: HFConfig) -> ModelShape:
    """What the decoders with gated delta nets have, without experts."""
    for key, known in (("attention_bias", False), ("attn_output_gate", True)):
        only(config, key, known)
    shape = decoder({**config, "layer_types": None})  # has kinds of its own
    return replace(
        shape,
        rotary=rotary_of(config, rotated_dims(config, shape.head_dim)),
        mixers=_mixers(config),
        delta_net=_delta_net(config),
        attention_gate=True,
        zero_centred_norms=True,
        carried=("mtp.",),
    )


def with_experts(shape: ModelShape, config: HFConfig) -> ModelShape:
    """The decoder with experts, and an expert that every token goes to, which has a gate."""
    shared = shared_size(config)
    return replace(
        shape, shared_expert_gate=True, shared_expert_size=shared, **softmax_experts(config)
    )


def _qwen3_next(config: HFConfig) -> ModelShape:
    shape = gated_decoder(config)
    return with_experts(shape, config)


def _mixers(config: HFConfig) -> tuple[str, ...]:
    layers = config["num_hidden_layers"]
    interval = config.get("full_attention_interval", 4)
    by_interval = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(layers)
    ]
    kinds = config.get("layer_types") or by_interval
    if len(kinds) != layers or set(kinds) - _MIXERS.keys():
        problem = f"layer_types={shown(kinds)} in config.json"
        raise ModelError(f"{problem}: give {' or '.join(_MIXERS)} for each of {layers} layers")
    return tuple(_MIXERS[kind] for kind in kinds)


def _delta_net(config: HFConfig) -> DeltaNetSizes:
    sizes = DeltaNetSizes(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_size=config["linear_key_head_dim"],
        value_size=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
    )
    if sizes.value_heads % sizes.key_heads:
        raise ModelError(
            f"linear_num_value_heads={sizes.value_heads} in config.json is no multiple of "
            f"linear_num_key_heads={sizes.key_heads}"
        )
    return sizes


QWEN_NEXT = (
    Family(
        "qwen3_next",
        _qwen3_next,
        {"attention": GATED_ATTENTION, "gated_delta_net": (*DELTA_NET, _PROJECTION)},
        DENSE,
        EXPERTS + SHARED_EXPERT,
    ),
)
