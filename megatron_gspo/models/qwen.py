"""Qwen3, Qwen3-MoE and Qwen2-MoE.

Sources: transformers ``modeling_qwen3.py``, ``modeling_qwen3_moe.py`` and ``modeling_qwen2_moe.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_gspo.models.config_reader import decoder
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelError, ModelShape, Router
from megatron_gspo.models.rule_tables import (
    ATTENTION,
    ATTENTION_BIAS,
    DENSE,
    EXPERTS,
    QUERY_KEY_NORMS,
    SHARED_EXPERT,
)


def _qwen3(config: dict[str, Any]) -> ModelShape:
    if config.get("attention_bias"):
        raise ModelError(
            "attention_bias=true in config.json is not supported for Qwen3; its published models have none"
        )
    return decoder(config)


def _qwen3_moe(config: dict[str, Any]) -> ModelShape:
    return replace(_qwen3(config), **_experts(config))


def _qwen2_moe(config: dict[str, Any]) -> ModelShape:
    if config.get("qkv_bias") is False:
        raise ModelError("qkv_bias=false in config.json is not supported for Qwen2-MoE; its published models have it")
    return replace(
        decoder(config), attention_bias=True, query_key_norms=False, shared_expert_gate=True,
        shared_expert_size=config["shared_expert_intermediate_size"], **_experts(config),
    )  # fmt: skip


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """What the mixtures of experts have."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    experts = config.get("num_experts") or config.get("num_local_experts") or config["num_experts"]
    return dict(
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        router=Router(normalize=bool(config.get("norm_topk_prob", False))),
    )


_QWEN3 = {"attention": ATTENTION + QUERY_KEY_NORMS}
QWEN = (
    Family("qwen3", _qwen3, _QWEN3, DENSE),
    Family("qwen3_moe", _qwen3_moe, _QWEN3, DENSE, EXPERTS),
    Family("qwen2_moe", _qwen2_moe, {"attention": ATTENTION + ATTENTION_BIAS}, DENSE, EXPERTS + SHARED_EXPERT),
)
