"""Multi-head latent attention with sigmoid routers: DeepSeek-V3 (also Moonlight), Kimi-K2, the
language model of Kimi-K2.5, and GLM-4.7-Flash; over the positions that an indexer selects:
DeepSeek-V3.2 and GLM-5.

Sources: transformers ``modeling_deepseek_v3.py``, ``modeling_glm4_moe_lite.py``,
``modeling_deepseek_v32.py``, ``modeling_glm_moe_dsa.py`` and ``conversion_mapping.py``, and the
files of the published models.
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
from megatron_gspo.models.model_shape import IndexerSizes, LatentSizes, ModelError, ModelShape
from megatron_gspo.models.rule_tables import (
    DENSE,
    EXPERTS,
    INDEXER,
    LATENT_ATTENTION,
    UNGATED_SHARED_EXPERTS,
)
from megatron_gspo.models.with_images import with_images


def _deepseek(config: HFConfig) -> ModelShape:
    return _latent(config, _behind_dense_layers(config))


def _glm_lite(config: HFConfig) -> ModelShape:
    if config.get("mlp_layer_types") is None:
        # Transformers has one dense layer then, whatever first_k_dense_replace is.
        only(config, "first_k_dense_replace", 1)
        return _latent(config, _behind_dense_layers(config))
    return _latent(config, _listed_layers(config))


def _deepseek_v32(config: HFConfig) -> ModelShape:
    return _indexed(config, interleaved=False)


def _glm_dsa(config: HFConfig) -> ModelShape:
    layers = config["num_hidden_layers"]
    pattern = config.get("index_topk_pattern")
    kinds = config.get("indexer_types")
    if kinds is None and pattern is not None:
        kinds = ["full" if kind in ("F", "full") else "shared" for kind in pattern]
    if kinds is None:
        only(config, "index_topk_freq", 1)
    elif list(kinds) != ["full"] * layers:
        raise ModelError(
            f"indexer_types={shown(kinds)} in config.json is not supported: layers that share an"
            " earlier layer's selection (GLM-5.2) would need it from another pipeline stage and when"
            f" they are recomputed; known: full for each of {layers} layers"
        )
    return _indexed(config, interleaved=True)


def _behind_dense_layers(config: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts, by the number of dense ones before them."""
    dense = config["first_k_dense_replace"]
    only(config, "moe_layer_freq", 1)
    return tuple(layer >= dense for layer in range(config["num_hidden_layers"]))


def _listed_layers(config: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts, by a list of their kinds."""
    layers = config["num_hidden_layers"]
    kinds = config["mlp_layer_types"]
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        problem = f"mlp_layer_types={shown(kinds)} in config.json"
        raise ModelError(f"{problem}: give dense or sparse for each of {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _indexed(config: HFConfig, *, interleaved: bool) -> ModelShape:
    """Latent attention over selected positions. interleaved: whether the pairs that the indexer
    rotates are neighbours; those of the attention are."""
    layers = config["num_hidden_layers"]
    for key, known in (
        ("layer_types", ["indexed_attention"] * layers),
        ("rope_interleave", True),
        ("indexer_rope_interleave", interleaved),
    ):
        only(config, key, known)
    if config["q_lora_rank"] is None:
        raise ModelError(
            "q_lora_rank=null in config.json is not supported: the indexer's queries are made of the"
            " latent; give its rank"
        )
    sizes = IndexerSizes(
        heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        topk=config["index_topk"],
        interleaved=interleaved,
    )
    if sizes.head_dim < config["qk_rope_head_dim"]:
        raise ModelError(
            f"index_head_dim={sizes.head_dim} in config.json is less than"
            f" qk_rope_head_dim={config['qk_rope_head_dim']}, the dimensions that are rotated"
        )
    listed = config.get("mlp_layer_types") is not None
    shape = _latent(
        {**config, "rope_interleave": True, "layer_types": None, "index_topk": None},
        _listed_layers(config) if listed else _behind_dense_layers(config),
    )
    return replace(shape, mixers=("sparse_latent_attention",) * layers, indexer=sizes)


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


_FEED_FORWARD = DENSE, EXPERTS + UNGATED_SHARED_EXPERTS
_RULES = {"latent_attention": LATENT_ATTENTION}, *_FEED_FORWARD
_SPARSE_RULES = {"sparse_latent_attention": LATENT_ATTENTION + INDEXER}, *_FEED_FORWARD
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
    Family("deepseek_v32", _deepseek_v32, *_SPARSE_RULES),
    Family("glm_moe_dsa", _glm_dsa, *_SPARSE_RULES),
)
