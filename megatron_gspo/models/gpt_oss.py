"""gpt-oss: attention with sinks, every other layer with a window, and experts with biases and a
clamped gated unit.

Sources: transformers ``modeling_gpt_oss.py`` and the files of the published models.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.config_reader import (
    decoder,
    only,
    rotary_of,
    rotary_parameters,
    softmax_router,
    windows_of,
)
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.rule_tables import (
    ATTENTION,
    ATTENTION_BIAS,
    BIASED_EXPERTS,
    DENSE,
    OUTPUT_BIAS,
    SINKS,
)

# What published configs leave out is what all models of the family have.
_ROPE = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def _gpt_oss(config: HFConfig) -> ModelShape:
    for key, known in (("attention_bias", True), ("swiglu_alpha", 1.702)):
        only(config, key, known)
    only({**config, **rotary_parameters(config)}, "partial_rotary_factor", 1.0)
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        ("sliding_attention", "full_attention")[i % 2] for i in range(layers)
    ]
    scaling = config.get("rope_scaling")
    if not scaling and config.get("rope_parameters") is None:
        scaling = _ROPE
    shape = decoder(
        {
            **config,
            "rope_parameters": None,
            "rope_scaling": None,
            "layer_types": None,
            "use_sliding_window": None,
        }
    )
    return replace(
        shape,
        rotary=rotary_of(
            {**config, "rope_scaling": scaling}, shape.head_dim, types=("yarn", "default")
        ),
        mixers=("sink_attention",) * layers,
        windows=windows_of(config, kinds),
        query_key_norms=False,
        attention_bias=True,
        linear_bias=True,
        glu_limit=float(config["swiglu_limit"]),
        moe_layers=(True,) * layers,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["intermediate_size"],
        router=softmax_router(config),
    )


GPT_OSS = (
    Family(
        "gpt_oss",
        _gpt_oss,
        {"sink_attention": ATTENTION + ATTENTION_BIAS + OUTPUT_BIAS + SINKS},
        DENSE,
        BIASED_EXPERTS,
    ),
)
