"""The model families, one table each. A new family is a new entry of ``FAMILIES``.

Sources: transformers ``modeling_qwen3.py``, ``modeling_qwen3_moe.py`` and ``modeling_qwen2_moe.py``; Megatron-Core
``GPTModel`` parameter names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_gspo.models.mapping_rules import Rule, Shard, merge_qkv, merge_rows, split_qkv, split_two
from megatron_gspo.models.model_shape import ModelError, ModelShape, check_sizes, rope_theta

OUTER = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Shard.ROWS),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",), Shard.ROWS),
)
# As in Transformers' `...ForSequenceClassification` with one label.
VALUE_HEAD = Rule(("output_layer.weight",), ("score.weight",))
ATTENTION = (
    Rule(("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), ("input_layernorm.weight",)),
    Rule(
        ("self_attention.linear_qkv.weight",),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        Shard.ROWS,
        merge_qkv,
        split_qkv,
    ),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Shard.COLUMNS),
)
QUERY_KEY_NORMS = (
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
)
ATTENTION_BIAS = (
    Rule(
        ("self_attention.linear_qkv.bias",),
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        Shard.ROWS,
        merge_qkv,
        split_qkv,
    ),
)
DENSE = (
    Rule(("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), ("post_attention_layernorm.weight",)),
    Rule(
        ("mlp.linear_fc1.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        Shard.ROWS,
        merge_rows,
        split_two,
    ),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Shard.COLUMNS),
)
EXPERTS = (
    Rule(("pre_mlp_layernorm.weight",), ("post_attention_layernorm.weight",)),
    Rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    Rule(
        ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc1.weight"),
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        Shard.ROWS,
        merge_rows,
        split_two,
    ),
    Rule(
        ("mlp.experts.linear_fc2.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc2.weight"),
        ("mlp.experts.{expert}.down_proj.weight",),
        Shard.COLUMNS,
    ),
)
SHARED_EXPERT = (
    Rule(
        ("mlp.shared_experts.linear_fc1.weight",),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        Shard.ROWS,
        merge_rows,
        split_two,
    ),
    Rule(("mlp.shared_experts.linear_fc2.weight",), ("mlp.shared_expert.down_proj.weight",), Shard.COLUMNS),
    Rule(("mlp.shared_experts.gate_weight",), ("mlp.shared_expert_gate.weight",)),
)


@dataclass(frozen=True)
class Family:
    """A model type: how to read its sizes, and the rules of its layers (names relative to the layer)."""

    model_type: str
    shape: Callable[[dict[str, Any]], ModelShape]
    outer: tuple[Rule, ...]
    attention: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    experts: tuple[Rule, ...] = ()

    def layer_rules(self, shape: ModelShape, layer: int) -> tuple[Rule, ...]:
        """The rules of layer ``layer``, attention first."""
        return self.attention + (self.experts if shape.moe_layers[layer] else self.dense)

    def outer_rules(self, shape: ModelShape) -> tuple[Rule, ...]:
        """The rules outside of the layers; with tied embeddings there is no output weight."""
        if not shape.tied_embeddings and not shape.value_head:
            return self.outer
        rules = tuple(rule for rule in self.outer if rule.megatron != VALUE_HEAD.megatron)
        return (*rules, VALUE_HEAD) if shape.value_head else rules


def _qwen3(config: dict[str, Any]) -> ModelShape:
    if config.get("attention_bias"):
        raise ModelError(
            "attention_bias=true in config.json is not supported for Qwen3; its published models have none"
        )
    return _decoder(config)


def _qwen3_moe(config: dict[str, Any]) -> ModelShape:
    return replace(_qwen3(config), **_experts(config))


def _qwen2_moe(config: dict[str, Any]) -> ModelShape:
    if config.get("qkv_bias") is False:
        raise ModelError("qkv_bias=false in config.json is not supported for Qwen2-MoE; its published models have it")
    shared = config["shared_expert_intermediate_size"]
    return replace(
        _decoder(config), attention_bias=True, query_key_norms=False, shared_expert_size=shared, **_experts(config)
    )


def _decoder(config: dict[str, Any]) -> ModelShape:
    """What all families have."""
    heads = config["num_attention_heads"]
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window=true in config.json is not supported; set it to false")
    return ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        moe_layers=(False,) * config["num_hidden_layers"],
    )


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
        normalize_topk=bool(config.get("norm_topk_prob", False)),
    )


FAMILIES = {
    "qwen3": Family("qwen3", _qwen3, OUTER, ATTENTION + QUERY_KEY_NORMS, DENSE),
    "qwen3_moe": Family("qwen3_moe", _qwen3_moe, OUTER, ATTENTION + QUERY_KEY_NORMS, DENSE, EXPERTS),
    "qwen2_moe": Family("qwen2_moe", _qwen2_moe, OUTER, ATTENTION + ATTENTION_BIAS, DENSE, EXPERTS + SHARED_EXPERT),
}


def family_of(config: dict[str, Any]) -> tuple[Family, ModelShape]:
    """The family and sizes of a Hugging Face config; ``ModelError`` for an unknown ``model_type``."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"model_type={model_type!r} in config.json is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    check_sizes(config)
    try:
        return family, family.shape(config)
    except KeyError as error:
        raise ModelError(f"config.json of a {model_type} model lacks the key {error}") from None


def hugging_face_names(family: Family, shape: ModelShape) -> Iterator[str]:
    """Every tensor name that a checkpoint of this model holds, in the order of the layers."""
    embedding, *rest = family.outer_rules(shape)
    yield from embedding.names()
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            for expert in range(shape.num_experts) if rule.is_expert else (0,):
                yield from (f"model.layers.{layer}.{name}" for name in rule.names(layer, expert))
    for rule in rest:
        yield from rule.names()


def with_value_head(shape: ModelShape) -> ModelShape:
    """The value model of these sizes, which has no use for the output weight."""
    return replace(shape, tied_embeddings=False, value_head=True)


def check_names(names: set[str], family: Family, shape: ModelShape) -> None:
    """Compare a checkpoint's tensor names with what the model needs; ``ModelError`` names one missing or extra.

    A value model takes a language model's checkpoint too.
    """
    expected = set(hugging_face_names(family, shape))
    if shape.tied_embeddings or shape.value_head:
        names = names - {"lm_head.weight"}
    if shape.value_head:
        names = names | set(VALUE_HEAD.hugging_face)
    if missing := sorted(expected - names):
        raise ModelError(f"checkpoint lacks {missing[0]} ({len(missing)} missing); config.json and weights disagree")
    if extra := sorted(names - expected):
        raise ModelError(f"checkpoint has {extra[0]}, which the model does not use ({len(extra)} extra)")
