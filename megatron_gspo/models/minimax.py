"""MiniMax-M2: grouped queries, rotary embedding of a part of each head, norms of all heads
together, sigmoid routers.

Source: transformers ``modeling_minimax_m2.py``, and the files of the published models.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.config_reader import (
    decoder,
    layers_behind,
    only,
    rotary_of,
    rotary_parameters,
    rotated_dims,
    without_groups,
)
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule
from megatron_gspo.models.model_shape import ModelError, ModelShape, Router
from megatron_gspo.models.rule_tables import ATTENTION, DENSE, EXPERTS, JOINT_NORMS

_ONLY = (
    ("scoring_func", "sigmoid"),
    ("use_routing_bias", True),
    ("use_qk_norm", True),
    ("qk_norm_type", "per_layer"),
    ("shared_intermediate_size", 0),
    ("attention_bias", False),
    ("router_jitter_noise", 0.0),
    ("sliding_window", None),
)
# Parts of names in the published files, and what Transformers has in their place.
_IN_TRANSFORMERS = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def _stored(name: str) -> str:
    """The name in published files of a tensor that other families have under ``name``, relative
    to the layer.
    """
    name = name.replace("mlp.gate.e_score", "mlp.e_score")
    for stored, usual in _IN_TRANSFORMERS:
        name = f".{name}".replace(usual, stored)[1:]
    return name


def _renamed(rule: Rule) -> Rule:
    """The rule under the names of published files; PEFT's adapters have those of Transformers'
    models.
    """
    return replace(rule, hugging_face=tuple(map(_stored, rule.hugging_face)), takes_adapter=False)


def _rotated(config: HFConfig, head_dim: int) -> int:
    """The rotated dimensions of a head. Published configs have ``rotary_dim``;
    ``partial_rotary_factor``, which Transformers writes, comes before it."""
    width = config.get("rotary_dim")
    if width is None or "partial_rotary_factor" in rotary_parameters(config):
        return rotated_dims(config, head_dim)
    if width > head_dim:
        problem = (
            f"rotary_dim={width} in config.json is more than the {head_dim} dimensions of a head"
        )
        raise ModelError(f"{problem}; lower it")
    return int(width)


def _minimax_m2(config: HFConfig) -> ModelShape:
    layers = config["num_hidden_layers"]
    for key, known in (*_ONLY, ("attn_type_list", [1] * layers)):
        only(config, key, known)
    without_groups(config)
    shape = decoder(config)
    return replace(
        shape,
        rotary=rotary_of(config, _rotated(config, shape.head_dim)),
        mixers=("joint_norm_attention",) * layers,
        moe_layers=(True,) * layers,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["intermediate_size"],
        router=Router("sigmoid", expert_bias=True),
        carried=layers_behind(config),
    )


MINIMAX = (
    Family(
        "minimax_m2",
        _minimax_m2,
        {"joint_norm_attention": ATTENTION + JOINT_NORMS},
        DENSE,
        tuple(map(_renamed, EXPERTS)),
        in_transformers=_IN_TRANSFORMERS,
    ),
)
