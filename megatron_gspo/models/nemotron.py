"""Nemotron-3: layers of Mamba-2, attention without positions, an MLP or experts, one of them in
each. MLPs are squared ReLUs without a gate; routers are those of DeepSeek-V3.

Sources: transformers ``configuration_nemotron_h.py``, ``modeling_nemotron_h.py`` and
``conversion_mapping.py``, and the files of the published models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.config_reader import only, sigmoid_experts
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule, Shard, merge_qkv, split_qkv
from megatron_gspo.models.model_shape import (
    NO_MIXER,
    Mamba2Sizes,
    ModelError,
    ModelShape,
    check_sizes,
)
from megatron_gspo.models.qwen_next import grouped, ungrouped
from megatron_gspo.models.rotary import NO_ROTARY

_OF_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
# As Python's JSON has it, as a config of Transformers does, and as its files do.
_NO_LIMITS = ([0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
_MIXERS = {"linear_attention": "mamba2", "full_attention": "attention"}


def _nemotron_h(config: HFConfig) -> ModelShape:
    kinds = _kinds(config)
    heads = config["num_attention_heads"]
    for key, known in (
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("use_conv_bias", True),
        ("residual_in_fp32", False),
        ("tie_word_embeddings", False),
        ("sliding_window", None),
        ("mamba_ssm_cache_dtype", "float32"),
        ("norm_eps", config["layer_norm_epsilon"]),  # another name of it in published files
    ):
        only(config, key, known)
    limit = config.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise ModelError(
            f"time_step_limit={shown(limit)} in config.json is not supported: time steps are not"
            " clamped; remove the key"
        )
    return ModelShape(
        model_type=config["model_type"],
        num_layers=len(kinds),
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"] or heads,
        head_dim=config["head_dim"] or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["layer_norm_epsilon"],
        rotary=NO_ROTARY,
        max_position_embeddings=config["max_position_embeddings"],
        tied_embeddings=False,
        mixers=tuple(_MIXERS.get(kind, NO_MIXER) for kind in kinds),
        mlp_layers=tuple(kind not in _MIXERS for kind in kinds),
        moe_layers=tuple(kind == "moe" for kind in kinds),
        query_key_norms=False,
        squared_relu=True,
        mamba=_mamba(config),
        **(_experts(config, len(kinds)) if "moe" in kinds else {}),
        carried=("mtp.",),
    )


def _kinds(config: HFConfig) -> list[str]:
    """The kind of each layer, from a list or from the letters of published files."""
    key = "layers_block_type" if config.get("layers_block_type") else "layer_types"
    pattern = config.get("hybrid_override_pattern")
    listed = config.get(key)
    if listed is None and not isinstance(pattern, str):
        raise ModelError(
            f"hybrid_override_pattern={shown(pattern)} in config.json: give a letter of"
            f" {' '.join(_OF_LETTER)} for each layer"
        )
    by_letter = [_OF_LETTER.get(letter, letter) for letter in pattern or ""]
    kinds = by_letter if listed is None else [_OLDER_NAMES.get(kind, kind) for kind in listed]
    if unknown := sorted(set(kinds) - set(_OF_LETTER.values())):
        raise ModelError(
            f"config.json has layers of kind {shown(unknown[0])}; known: {', '.join(_OF_LETTER)} in"
            f" hybrid_override_pattern, {', '.join(_OF_LETTER.values())} in layers_block_type"
        )
    if pattern is not None and by_letter != kinds:
        raise ModelError(
            f"{key} and hybrid_override_pattern in config.json are not the same layers; remove one"
            " of them"
        )
    layers = config.get("num_hidden_layers", len(kinds))
    if layers != len(kinds):
        raise ModelError(
            f"num_hidden_layers={layers} in config.json, whose layers' kinds are {len(kinds)}; give"
            " as many"
        )
    if "linear_attention" not in kinds:
        raise ModelError("config.json has no layer of Mamba-2; give one")
    check_sizes({**config, "num_hidden_layers": len(kinds)})
    return kinds


def _mamba(config: HFConfig) -> Mamba2Sizes:
    sizes = Mamba2Sizes(
        heads=config["mamba_num_heads"],
        head_size=config["mamba_head_dim"],
        groups=config["n_groups"],
        state_size=config["ssm_state_size"],
        kernel=config["conv_kernel"],
    )
    if sizes.heads % sizes.groups:
        raise ModelError(
            f"mamba_num_heads={sizes.heads} in config.json is no multiple of n_groups={sizes.groups}"
        )
    return sizes


def _experts(config: HFConfig, layers: int) -> dict[str, Any]:
    latent = config.get("moe_latent_size")
    if latent is not None:
        raise ModelError(
            f"moe_latent_size={shown(latent)} in config.json is not supported: experts that work in"
            " a latent of the hidden state (Nemotron-3-Super) are not built"
        )
    only(config, "n_shared_experts", 1)
    experts = sigmoid_experts({**config, "num_hidden_layers": layers})
    del experts["carried"]
    return experts | dict(shared_expert_size=config["moe_shared_expert_intermediate_size"])


def mamba_sizes(shape: ModelShape) -> Mamba2Sizes:
    """The sizes that a model with layers of Mamba-2 has."""
    assert shape.mamba is not None
    return shape.mamba


def convolved_blocks(shape: ModelShape) -> tuple[int, ...]:
    """Rows of all heads, of all groups' B and of their C."""
    sizes = mamba_sizes(shape)
    shared = sizes.groups * sizes.state_size
    return sizes.groups * sizes.values, shared, shared


def projected_blocks(shape: ModelShape) -> tuple[int, ...]:
    """Rows of all gates, heads, B, C and time steps."""
    sizes = mamba_sizes(shape)
    return sizes.groups * sizes.values, *convolved_blocks(shape), sizes.heads


def _of_rank(tensor: Tensor, blocks: tuple[int, ...]) -> list[Tensor]:
    """The parts that ``blocks`` are of a whole tensor, of one that has as much of each of them."""
    return list(tensor.split([size * tensor.shape[0] // sum(blocks) for size in blocks]))


def merge_projection(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[x B C dt z]`` for each group of this shard from all gates z, heads x, B, C and dt."""
    blocks = projected_blocks(shape)
    groups = parts[0].shape[0] * mamba_sizes(shape).groups // sum(blocks)
    gate, *others = _of_rank(parts[0], blocks)
    return grouped((*others, gate), groups)


def split_projection(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_projection``."""
    sizes = mamba_sizes(shape)
    shared = sizes.state_size
    runs = (sizes.values, shared, shared, sizes.heads_per_group, sizes.values)
    *others, gate = ungrouped(tensor, runs)
    return [torch.cat((gate, *others))]


def merge_filters(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """``[x B C]`` for each group of this shard from all heads, B and C."""
    blocks = convolved_blocks(shape)
    groups = parts[0].shape[0] * mamba_sizes(shape).groups // sum(blocks)
    return grouped(_of_rank(parts[0], blocks), groups)


def split_filters(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_filters``."""
    sizes = mamba_sizes(shape)
    return [torch.cat(ungrouped(tensor, (sizes.values, sizes.state_size, sizes.state_size)))]


def _layer(*rules: Rule) -> tuple[Rule, ...]:
    return tuple(replace(rule, prefix="backbone.layers.{layer}.") for rule in rules)


_MIXER_NORM = Rule(("input_layernorm.weight",), ("norm.weight",))
_MLP_NORM = Rule(("pre_mlp_layernorm.weight",), ("norm.weight",))
_ATTENTION = _layer(
    _MIXER_NORM,
    Rule(
        ("self_attention.linear_qkv.weight",),
        ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        Shard.ROWS,
        merge_qkv,
        split_qkv,
    ),
    Rule(("self_attention.linear_proj.weight",), ("mixer.o_proj.weight",), Shard.COLUMNS),
)
_MAMBA = _layer(
    _MIXER_NORM,
    Rule(
        ("self_attention.in_proj.weight",),
        ("mixer.in_proj.weight",),
        Shard.ROWS,
        merge_projection,
        split_projection,
        blocks=projected_blocks,
    ),
    *(
        Rule(
            (f"self_attention.conv1d.{name}",),
            (f"mixer.conv1d.{name}",),
            Shard.ROWS,
            merge_filters,
            split_filters,
            blocks=convolved_blocks,
        )
        for name in ("weight", "bias")
    ),
    *(
        Rule((f"self_attention.{name}",), (f"mixer.{name}",), Shard.ROWS)
        for name in ("dt_bias", "A_log", "D", "norm.weight")
    ),
    Rule(("self_attention.out_proj.weight",), ("mixer.out_proj.weight",), Shard.COLUMNS),
)
_MLP = _layer(
    _MLP_NORM,
    Rule(("mlp.linear_fc1.weight",), ("mixer.up_proj.weight",), Shard.ROWS),
    Rule(("mlp.linear_fc2.weight",), ("mixer.down_proj.weight",), Shard.COLUMNS),
)
_EXPERT = "mlp.experts.local_experts.{expert}."
_EXPERTS = _layer(
    _MLP_NORM,
    Rule(("mlp.router.weight",), ("mixer.gate.weight",)),
    Rule(
        ("mlp.router.expert_bias",),
        ("mixer.gate.e_score_correction_bias",),
        keeps_float32=True,
    ),
    Rule((f"{_EXPERT}linear_fc1.weight",), ("mixer.experts.{expert}.up_proj.weight",), Shard.ROWS),
    Rule(
        (f"{_EXPERT}linear_fc2.weight",),
        ("mixer.experts.{expert}.down_proj.weight",),
        Shard.COLUMNS,
    ),
    Rule(
        ("mlp.shared_experts.linear_fc1.weight",),
        ("mixer.shared_experts.up_proj.weight",),
        Shard.ROWS,
    ),
    Rule(
        ("mlp.shared_experts.linear_fc2.weight",),
        ("mixer.shared_experts.down_proj.weight",),
        Shard.COLUMNS,
    ),
)
_OUTER = (
    Rule(("embedding.word_embeddings.weight",), ("backbone.embeddings.weight",), Shard.ROWS),
    Rule(("decoder.final_layernorm.weight",), ("backbone.norm_f.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",), Shard.ROWS),
)
NEMOTRON = (
    Family(
        "nemotron_h",
        _nemotron_h,
        {"attention": _ATTENTION, "mamba2": _MAMBA, NO_MIXER: ()},
        _MLP,
        _EXPERTS,
        _OUTER,
        in_transformers=(("backbone.", "model."),),
    ),
)
