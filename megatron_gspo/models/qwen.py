"""Qwen3, Qwen3-MoE and Qwen2-MoE.

Sources: transformers ``modeling_qwen3.py``, ``modeling_qwen3_moe.py`` and
``modeling_qwen2_moe.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.config_reader import (
    decoder,
    only,
    rotary_parameters,
    softmax_router,
    windows_of,
)
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelError, ModelShape
from megatron_gspo.models.rule_tables import (
    ATTENTION,
    ATTENTION_BIAS,
    DENSE,
    EXPERTS,
    QUERY_KEY_NORMS,
    SHARED_EXPERT,
)


def _decoder(config: HFConfig, slides: Callable[[int], bool]) -> ModelShape:
    """With YaRN, and the windows of ``layer_types``, or of the layers that slide without it."""
    only({**config, **rotary_parameters(config)}, "partial_rotary_factor", 1.0)
    used = config["use_sliding_window"]
    with_window = {**config, "sliding_window": config["sliding_window"] if used else None}
    kinds = config.get("layer_types") or [
        "sliding_attention" if used and slides(layer) else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    windows = windows_of(with_window, kinds)
    return replace(
        decoder(
            {**config, "use_sliding_window": None, "layer_types": None},
            rope_types=("default", "yarn"),
        ),
        windows=windows,
        mixers=tuple("attention" if window is None else "windowed_attention" for window in windows),
    )


def _qwen3(config: HFConfig) -> ModelShape:
    return _without_bias(config, lambda layer: layer >= config["max_window_layers"])


def _without_bias(config: HFConfig, slides: Callable[[int], bool]) -> ModelShape:
    if config["attention_bias"]:
        raise ModelError(
            "attention_bias=true in config.json is not supported for Qwen3; its published models"
            " have none"
        )
    return _decoder(config, slides)


def _qwen3_moe(config: HFConfig) -> ModelShape:
    kind = "sliding_attention" if config["use_sliding_window"] else "full_attention"
    for key, known in (
        ("layer_types", [kind] * config["num_hidden_layers"]),
        ("shared_expert_intermediate_size", 0),
        ("qkv_bias", False),
        ("use_qk_norm", True),
    ):
        # Transformers doesn't read them; Qwen3-Coder's config.json has the last three.
        only(config, key, known)
    return replace(_without_bias(config, lambda layer: True), **softmax_experts(config))


def _qwen2_moe(config: HFConfig) -> ModelShape:
    if not config["qkv_bias"]:
        raise ModelError(
            "qkv_bias=false in config.json is not supported for Qwen2-MoE; its published models"
            " have it"
        )
    most = config["max_window_layers"]
    return replace(
        _decoder(config, lambda layer: layer % 2 == 0 and layer < most),
        attention_bias=True,
        query_key_norms=False,
        shared_expert_gate=True,
        shared_expert_size=shared_size(config),
        **softmax_experts(config),
    )


def shared_size(config: HFConfig) -> int:
    """Width of the expert that every token goes to, of a family in which all have it."""
    size = config["shared_expert_intermediate_size"]
    if not size:
        raise ModelError(
            "shared_expert_intermediate_size=0 in config.json is not a size; give an integer"
            " above 0"
        )
    return int(size)


def softmax_experts(config: HFConfig) -> dict[str, Any]:
    """What the mixtures of experts have."""
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    experts = config.get("num_experts") or config.get("num_local_experts") or config["num_experts"]
    return dict(
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        router=softmax_router(config, normalize=config["norm_topk_prob"]),
    )


_QWEN3 = dict.fromkeys(("attention", "windowed_attention"), ATTENTION + QUERY_KEY_NORMS)
_QWEN2 = dict.fromkeys(("attention", "windowed_attention"), ATTENTION + ATTENTION_BIAS)
QWEN = (
    Family("qwen3", _qwen3, _QWEN3, DENSE),
    Family("qwen3_moe", _qwen3_moe, _QWEN3, DENSE, EXPERTS),
    Family("qwen2_moe", _qwen2_moe, _QWEN2, DENSE, EXPERTS + SHARED_EXPERT),
)
