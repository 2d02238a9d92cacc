"""Multi-head latent attention with sigmoid routers: DeepSeek-V3 (also Moonlight), Kimi-K2, the
language model of Kimi-K2.5, and GLM-4.7-Flash.

Sources: transformers ``modeling_deepseek_v3.py``, ``modeling_glm4_moe_lite.py`` and
``conversion_mapping.py``, and the files of the published models.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.config_reader import (
    decoder,
    only,
    rotary_of,
    rotary_parameters,
    sigmoid_experts,
)
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import LatentSizes, ModelError, ModelShape
from megatron_gspo.models.rule_tables import (
    DENSE,
    EXPERTS,
    LATENT_ATTENTION,
    UNGATED_SHARED_EXPERTS,
)
from megatron_gspo.models.with_images import with_images


def _deepseek(config: HFConfig) -> ModelShape:
    layers = config["num_hidden_layers"]
    dense = config["first_k_dense_replace"]
    only(config, "moe_layer_freq", 1)
    return _latent(config, tuple(layer >= dense for layer in range(layers)))


def _glm_lite(config: HFConfig) -> ModelShape:
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types")
    if kinds is None:  # Transformers has one dense layer then, whatever first_k_dense_replace is
        only(config, "first_k_dense_replace", 1)
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        problem = f"mlp_layer_types={shown(kinds)} in config.json"
        raise ModelError(f"{problem}: give dense or sparse for each of {layers} layers")
    return _latent(config, tuple(kind == "sparse" for kind in kinds))


def _latent(config: HFConfig, moe_layers: tuple[bool, ...]) -> ModelShape:
    dim = config["qk_rope_head_dim"]
    for key, known in (
        ("attention_bias", False),
        ("num_key_value_heads", config["num_attention_heads"]),
        ("use_qk_norm", False),
        ("head_dim", dim),  # Transformers' name for the rotated dimensions of a head
    ):
        only(config, key, known)
    only({**config, **rotary_parameters(config)}, "partial_rotary_factor", 1.0)
    sizes = LatentSizes(
        query_rank=config["q_lora_rank"],
        key_value_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    return replace(
        decoder(
            {
                **config,
                "head_dim": sizes.plain_dim + dim,
                "rope_parameters": None,
                "rope_scaling": None,
            }
        ),
        rotary=rotary_of(
            config, dim, interleaved=config["rope_interleave"], types=("default", "yarn")
        ),
        mixers=("latent_attention",) * len(moe_layers),
        latent=sizes,
        query_key_norms=False,
        moe_layers=moe_layers,
        **sigmoid_experts(config),
    )


_RULES = {"latent_attention": LATENT_ATTENTION}, DENSE, EXPERTS + UNGATED_SHARED_EXPERTS
# What names begin with in the files of Kimi-K2.5.
_IN_WHOLE = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _deepseek,
    *_RULES,
    in_transformers=tuple((whole, alone) for alone, whole in _IN_WHOLE.items()),
)
DEEPSEEK = (
    _DEEPSEEK_V3,
    Family("kimi_k2", _deepseek, *_RULES, type_in_transformers="deepseek_v3"),
    with_images(
        _DEEPSEEK_V3,
        "kimi_k25",
        starts=_IN_WHOLE,
        carried=("vision_tower.", "mm_projector."),
        text_types=("kimi_k2", "deepseek_v3"),
    ),
    Family("glm4_moe_lite", _glm_lite, *_RULES),
)
