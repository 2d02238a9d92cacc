"""What a key means that a ``config.json`` leaves out: the default of Transformers' config class of
its model type.

Transformers writes a flat config.json with every key of its class, so that one without a size is
damaged: most sizes have no default here. In a ``text_config`` it leaves out what has the default,
sizes too (``TEXT_SIZES``).

Source: transformers ``configuration_*.py`` of each model type, version 5;
``tests/models/test_config_defaults.py`` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from megatron_gspo.errors import ModelError

HFConfig: TypeAlias = dict[str, Any]
"""The content of a Hugging Face `config.json`, or a part of it."""

_ATTENTION: HFConfig = dict(
    hidden_act="silu",
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    partial_rotary_factor=1.0,
    tie_word_embeddings=False,
    attention_bias=False,
)
_WINDOWS: HFConfig = dict(use_sliding_window=False, sliding_window=4096)
_DELTA_NET: HFConfig = dict(head_dim=256, partial_rotary_factor=0.25, full_attention_interval=4)
_GROUPED_SIGMOID: HFConfig = dict(
    first_k_dense_replace=1,
    n_group=1,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
    topk_group=1,
)
_DEEPSEEK_V3 = {
    **_ATTENTION,
    **_GROUPED_SIGMOID,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
_DEEPSEEK_V32 = {
    **{key: value for key, value in _DEEPSEEK_V3.items() if key != "rope_interleave"},
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
_QWEN35 = {**_ATTENTION, **_DELTA_NET, "num_key_value_heads": 4}
_QWEN35_MOE = {**_ATTENTION, **_DELTA_NET, "num_key_value_heads": 2}
DEFAULTS: dict[str, HFConfig] = {
    "qwen3": {
        **_ATTENTION,
        **_WINDOWS,
        "head_dim": 128,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
    "qwen3_moe": {
        **_ATTENTION,
        **_WINDOWS,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "num_key_value_heads": 4,
    },
    "qwen2_moe": {
        **_ATTENTION,
        **_WINDOWS,
        "decoder_sparse_step": 1,
        "max_window_layers": 28,
        "norm_topk_prob": False,
        "num_key_value_heads": 16,
        "qkv_bias": True,
    },
    "qwen3_next": {
        **_ATTENTION,
        **_DELTA_NET,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 2,
    },
    "qwen3_5_text": _QWEN35,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5_moe": _QWEN35_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": {
        **_DEEPSEEK_V32,
        "index_n_heads": 32,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
    },
    "glm4_moe_lite": {
        **_ATTENTION,
        **_GROUPED_SIGMOID,
        "max_position_embeddings": 202752,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "rope_interleave": True,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    "glm4_moe": {
        **_ATTENTION,
        **_GROUPED_SIGMOID,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "gpt_oss": {
        **_ATTENTION,
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "nemotron_h": dict(
        attention_bias=False,
        conv_kernel=4,
        head_dim=128,
        layer_norm_epsilon=1e-5,
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
        max_position_embeddings=4096,
        mlp_bias=False,
        mlp_hidden_act="relu2",
        n_group=1,
        n_groups=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_key_value_heads=8,
        num_nextn_predict_layers=0,
        residual_in_fp32=False,
        routed_scaling_factor=1.0,
        ssm_state_size=128,
        tie_word_embeddings=False,
        topk_group=1,
        use_bias=False,
        use_conv_bias=True,
    ),
    "minimax_m2": {
        # Its partial_rotary_factor comes from rotary_dim.
        **{key: value for key, value in _ATTENTION.items() if key != "partial_rotary_factor"},
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "rope_theta": 5000000.0,
    },
}
_LINEAR_ATTENTION: HFConfig = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    num_attention_heads=16,
    vocab_size=248320,
)
TEXT_SIZES: dict[str, HFConfig] = {
    "qwen3_5": {
        **_LINEAR_ATTENTION,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
    },
    "qwen3_5_moe": {
        **_LINEAR_ATTENTION,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "shared_expert_intermediate_size": 512,
    },
    "kimi_k25": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
# Other names of a key, which Transformers takes for it (`attribute_map` of the config classes).
_ALIASES: dict[str, dict[str, str]] = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "minimax_m2": {"num_experts": "num_local_experts"},
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe", "glm4_moe_lite"),
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
}
# Keys that may be null beside those without a default: null key-value heads are as many as heads, a
# null rank means queries without a latent, a null window none, a null head_dim hidden_size / heads,
# null shared experts none.
_NULLABLE = (
    "head_dim",
    "n_shared_experts",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "text_config",
)
# Of the language model, where they are there at all.
_LISTS = {
    "layer_types": str,
    "layers_block_type": str,
    "mlp_layer_types": str,
    "indexer_types": str,
    "mlp_only_layers": int,
    "attn_type_list": int,
}
_OBJECTS = ("rope_parameters", "rope_scaling")
_LARGEST_NUMBER = 1e30
_SHOWN = 60  # characters of a value in a message


def with_defaults(
    model_type: object, given: Mapping[str, Any], *, is_text_config: bool = False
) -> HFConfig:
    """The language model's keys of a config.json with those that it leaves out; unchanged for an
    unknown model type.

    A key without a default that is null is left out. Raises ``ModelError`` for null where
    Transformers has no meaning for it, for a value of another type than the default's, and for two
    names of one key that disagree.
    """
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        return dict(given)
    defaults = DEFAULTS[model_type] | (TEXT_SIZES.get(model_type, {}) if is_text_config else {})
    named = {
        key: value
        for key, value in given.items()
        if value is not None or key in (*defaults, *_NULLABLE)
    }
    for alias, key in _ALIASES.get(model_type, {}).items():
        value = named.get(alias)
        if value is not None and named.setdefault(key, value) != value:
            both = f"{key}={shown(named[key])} and {alias}={shown(value)}"
            raise ModelError(f"{both} in config.json are two names of one key; remove one of them")
    for key in named:
        if key in defaults:
            _check_type(key, named[key], defaults[key])
    _check_nested(named)
    return {**defaults, **named}


def shown(value: object) -> str:
    """A value of a config.json, which anyone may have written, for a message of one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_type(key: str, value: object, default: object) -> None:
    if isinstance(default, float):
        check_number(key, value)
    elif value is None:
        if key not in _NULLABLE:
            raise ModelError(
                f"{key}=null in config.json has no meaning; give a value, or remove the key"
            )
    elif isinstance(default, bool) and not isinstance(value, bool):
        raise ModelError(
            f"{key}={shown(value)} in config.json is neither true nor false; give one of them"
        )


def check_number(key: str, value: object) -> None:
    """Raise ``ModelError`` unless the value of a key is a finite number above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < _LARGEST_NUMBER
    ):
        raise ModelError(
            f"{key}={shown(value)} in config.json is not supported; give a number above 0"
        )


def _check_nested(config: Mapping[str, Any]) -> None:
    """Lists have members of one type, and the objects are objects."""
    for key, member in _LISTS.items():
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or not all(type(item) is member for item in value):
            raise ModelError(
                f"{key}={shown(value)} in config.json is no list of type {member.__name__}"
            )
    for key in _OBJECTS:
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{key}={shown(value)} in config.json is no object")
