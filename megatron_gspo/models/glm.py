"""GLM-4.5 to 4.7: grouped queries, rotary embedding of a part of each head, sigmoid routers.

Source: transformers ``modeling_glm4_moe.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_gspo.models.config_reader import decoder, only, rotary_of, sigmoid_experts
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.rule_tables import (
    ATTENTION,
    ATTENTION_BIAS,
    DENSE,
    EXPERTS,
    QUERY_KEY_NORMS,
    UNGATED_SHARED_EXPERTS,
)


def _glm4_moe(config: dict[str, Any]) -> ModelShape:
    only(config, "moe_layer_freq", 1)
    shape, dense = decoder(config), config.get("first_k_dense_replace", 1)
    parameters = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
    return replace(
        shape,
        rotary=rotary_of(config, int(shape.head_dim * share)),
        attention_bias=bool(config.get("attention_bias", False)),
        query_key_norms=bool(config.get("use_qk_norm", False)),
        moe_layers=tuple(layer >= dense for layer in range(shape.num_layers)),
        **sigmoid_experts(config),
    )


GLM = (
    Family(
        "glm4_moe", _glm4_moe, {"attention": ATTENTION + ATTENTION_BIAS + QUERY_KEY_NORMS}, DENSE,
        EXPERTS + UNGATED_SHARED_EXPERTS,
    ),
)  # fmt: skip
