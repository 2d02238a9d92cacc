"""Rules of mapping that families share, a table for each part of a layer. Names are relative to the
layer.

Sources: the checkpoints of each family and Megatron-Core's parameter names, with Transformer Engine
and without.
"""

from __future__ import annotations

from megatron_gspo.models.mapping_rules import (
    Rule,
    Shard,
    merge_alternating,
    merge_qkv,
    merge_rows,
    merge_transposed,
    split_alternating,
    split_qkv,
    split_transposed,
    split_two,
)
from megatron_gspo.models.model_shape import ModelShape


def _with_latent(shape: ModelShape) -> bool:
    """Whether queries are made of a latent."""
    return shape.latent is not None and shape.latent.query_rank is not None


def _has_norms(shape: ModelShape) -> bool:
    return shape.query_key_norms


def _without_latent(shape: ModelShape) -> bool:
    return not _with_latent(shape)


OUTER = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Shard.ROWS),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",), Shard.ROWS),
)
# As in Transformers' `...ForSequenceClassification` with one label.
VALUE_HEAD = Rule(("output_layer.weight",), ("score.weight",))
ATTENTION = (
    Rule(
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("input_layernorm.weight",),
    ),
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
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",), applies=_has_norms),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",), applies=_has_norms),
)
# Over all heads: each tensor-parallel rank has the part of its heads.
JOINT_NORMS = (
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",), Shard.ROWS),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",), Shard.ROWS),
)
ATTENTION_BIAS = (
    Rule(
        ("self_attention.linear_qkv.bias",),
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        Shard.ROWS,
        merge_qkv,
        split_qkv,
        applies=lambda shape: shape.attention_bias,
    ),
)
DENSE = (
    Rule(
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("post_attention_layernorm.weight",),
    ),
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
        ("mlp.router.expert_bias",),
        ("mlp.gate.e_score_correction_bias",),
        applies=lambda shape: shape.router.expert_bias,
        keeps_float32=True,
    ),
    Rule(
        (
            "mlp.experts.linear_fc1.weight{expert}",
            "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ),
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        Shard.ROWS,
        merge_rows,
        split_two,
    ),
    Rule(
        (
            "mlp.experts.linear_fc2.weight{expert}",
            "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ),
        ("mlp.experts.{expert}.down_proj.weight",),
        Shard.COLUMNS,
    ),
)
# Of all experts in one tensor each, an expert's gate rows above its up rows.
STACKED_EXPERTS = (
    *(rule for rule in EXPERTS if not rule.is_expert),
    Rule(
        EXPERTS[-2].megatron,
        ("mlp.experts.gate_up_proj[{expert}]",),
        Shard.ROWS,
        blocks=lambda shape: (shape.moe_ffn_hidden_size,) * 2,
    ),
    Rule(EXPERTS[-1].megatron, ("mlp.experts.down_proj[{expert}]",), Shard.COLUMNS),
)
LATENT_ATTENTION = (
    Rule(("input_layernorm.weight",), ("input_layernorm.weight",)),
    Rule(
        ("self_attention.linear_q_proj.weight",),
        ("self_attn.q_proj.weight",),
        Shard.ROWS,
        applies=_without_latent,
    ),
    Rule(
        ("self_attention.linear_q_down_proj.weight",),
        ("self_attn.q_a_proj.weight",),
        applies=_with_latent,
    ),
    Rule(
        ("self_attention.q_layernorm.weight",),
        ("self_attn.q_a_layernorm.weight",),
        applies=_with_latent,
    ),
    Rule(
        ("self_attention.linear_q_up_proj.weight",),
        ("self_attn.q_b_proj.weight",),
        Shard.ROWS,
        applies=_with_latent,
    ),
    Rule(("self_attention.linear_kv_down_proj.weight",), ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule(("self_attention.kv_layernorm.weight",), ("self_attn.kv_a_layernorm.weight",)),
    Rule(("self_attention.linear_kv_up_proj.weight",), ("self_attn.kv_b_proj.weight",), Shard.ROWS),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Shard.COLUMNS),
)
# Frozen, and whole on every rank. Its norm is float32 in DeepSeek's own code.
_INDEXER = "self_attention.core_attention.indexer."
INDEXER = (
    *(
        Rule(
            (f"{_INDEXER}linear_{name}.weight",),
            (f"self_attn.indexer.{name}.weight",),
            takes_adapter=False,
        )
        for name in ("wq_b", "wk", "weights_proj")
    ),
    *(
        Rule(
            (f"{_INDEXER}k_norm.{name}",),
            (f"self_attn.indexer.k_norm.{name}",),
            keeps_float32=True,
        )
        for name in ("weight", "bias")
    ),
)
UNGATED_SHARED_EXPERTS = (
    Rule(
        ("mlp.shared_experts.linear_fc1.weight",),
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        Shard.ROWS,
        merge_rows,
        split_two,
        applies=lambda shape: bool(shape.shared_expert_size),
    ),
    Rule(
        ("mlp.shared_experts.linear_fc2.weight",),
        ("mlp.shared_experts.down_proj.weight",),
        Shard.COLUMNS,
        applies=lambda shape: bool(shape.shared_expert_size),
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
    Rule(
        ("mlp.shared_experts.linear_fc2.weight",),
        ("mlp.shared_expert.down_proj.weight",),
        Shard.COLUMNS,
    ),
    Rule(("mlp.shared_experts.gate_weight",), ("mlp.shared_expert_gate.weight",)),
)
OUTPUT_BIAS = (Rule(("self_attention.linear_proj.bias",), ("self_attn.o_proj.bias",)),)
SINKS = (Rule(("self_attention.core_attention.softmax_offset",), ("self_attn.sinks",), Shard.ROWS),)
_EXPERT = "mlp.experts.local_experts.{expert}."
BIASED_EXPERTS = (
    Rule(("pre_mlp_layernorm.weight",), ("post_attention_layernorm.weight",)),
    Rule(("mlp.router.weight",), ("mlp.router.weight",)),
    Rule(("mlp.router.bias",), ("mlp.router.bias",)),
    Rule(
        (_EXPERT + "linear_fc1.weight",),
        ("mlp.experts.gate_up_proj[{expert}]",),
        Shard.COLUMNS,
        merge_alternating,
        split_alternating,
    ),
    Rule(
        (_EXPERT + "linear_fc1.bias",),
        ("mlp.experts.gate_up_proj_bias[{expert}]",),
        Shard.ROWS,
        merge_alternating,
        split_alternating,
    ),
    Rule(
        (_EXPERT + "linear_fc2.weight",),
        ("mlp.experts.down_proj[{expert}]",),
        Shard.ROWS,
        merge_transposed,
        split_transposed,
    ),
    Rule((_EXPERT + "linear_fc2.bias",), ("mlp.experts.down_proj_bias[{expert}]",)),
)
