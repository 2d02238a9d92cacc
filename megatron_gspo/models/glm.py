"""GLM-4.5 to 4.7: grouped queries, rotary embedding of a part of each head, sigmoid routers.

Source: transformers ``modeling_glm4_moe.py``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.config_reader import (
    decoder,
    only,
    rotary_of,
    rotated_dims,
    sigmoid_experts,
)
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


def _glm4_moe(config: HFConfig) -> ModelShape:
    only(config, "moe_layer_freq", 1)
    shape = decoder(config)
    dense = config["first_k_dense_replace"]
    return replace(
        shape,
        rotary=rotary_of(config, rotated_dims(config, shape.head_dim)),
        attention_bias=config["attention_bias"],
        query_key_norms=config["use_qk_norm"],
        moe_layers=tuple(layer >= dense for layer in range(shape.num_layers)),
        **sigmoid_experts(config),
    )


GLM = (
    Family(
        "glm4_moe",
        _glm4_moe,
        {"attention": ATTENTION + ATTENTION_BIAS + QUERY_KEY_NORMS},
        DENSE,
        EXPERTS + UNGATED_SHARED_EXPERTS,
    ),
)
