"""Keys of published config.json files, beside those of examples/: none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.models import family_of

_LATENT = dict(
    attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1, hidden_act="silu", initializer_range=0.02,
    kv_lora_rank=512, n_shared_experts=1, norm_topk_prob=True, qk_rope_head_dim=64, tie_word_embeddings=False,
    topk_method="noaux_tc",
)  # fmt: skip
_DEEPSEEK = _LATENT | dict(
    model_type="deepseek_v3", aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=3, hidden_size=7168,
    intermediate_size=18432, max_position_embeddings=163840, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8,
    n_routed_experts=256, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
    num_key_value_heads=128, num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=1536, qk_nope_head_dim=128,
    rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True,
    topk_group=4, v_head_dim=128, vocab_size=129280,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
)  # fmt: skip
_GLM = dict(
    model_type="glm4_moe", attention_bias=True, first_k_dense_replace=3, head_dim=128, hidden_act="silu",
    hidden_size=5120, intermediate_size=12288, max_position_embeddings=131072, moe_intermediate_size=1536, n_group=1,
    n_routed_experts=160, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8,
    num_hidden_layers=92, num_key_value_heads=8, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
    rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=2.5, tie_word_embeddings=False,
    topk_group=1, use_qk_norm=True, vocab_size=151552,
)  # fmt: skip
_QWEN2 = dict(
    model_type="qwen2_moe", decoder_sparse_step=1, hidden_act="silu", hidden_size=3584, intermediate_size=18944,
    max_position_embeddings=131072, max_window_layers=28, moe_intermediate_size=2560, norm_topk_prob=False,
    num_attention_heads=28, num_experts=64, num_experts_per_tok=8, num_hidden_layers=28, num_key_value_heads=4,
    rms_norm_eps=1e-6, rope_theta=1000000.0, router_aux_loss_coef=0.001, shared_expert_intermediate_size=20480,
    sliding_window=65536, tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
_QWEN3 = dict(
    model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=2560,
    intermediate_size=9728, max_position_embeddings=40960, max_window_layers=36, num_attention_heads=32,
    num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
    sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
PUBLISHED = {
    "DeepSeek-V3, -R1": _DEEPSEEK,
    "Kimi-K2": _DEEPSEEK | dict(
        model_type="kimi_k2", first_k_dense_replace=1, n_group=1, n_routed_experts=384, num_attention_heads=64,
        num_key_value_heads=64, num_nextn_predict_layers=0, rope_theta=50000.0, routed_scaling_factor=2.827,
        topk_group=1, vocab_size=163840, rope_scaling=_DEEPSEEK["rope_scaling"] | dict(beta_fast=1.0, factor=32.0),
    ),
    "GLM-4.7-Flash": _LATENT | dict(
        model_type="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, max_position_embeddings=202752,
        moe_intermediate_size=1536, n_group=1, n_routed_experts=64, num_attention_heads=20, num_experts_per_tok=4,
        num_hidden_layers=47, num_key_value_heads=20, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        q_lora_rank=768, qk_nope_head_dim=192, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
        routed_scaling_factor=1.8, topk_group=1, v_head_dim=256, vocab_size=154880,
    ),
    "GLM-4.5": _GLM,
    "GLM-4.6, -4.7": _GLM | dict(max_position_embeddings=202752),
    "Qwen2-57B-A14B": _QWEN2,
    "Qwen3-4B": _QWEN3,
}  # fmt: skip
# Of the larger models of a family with a config in examples/: what differs.
LARGER = {
    "gpt_oss/gpt-oss-20b": dict(num_hidden_layers=36, num_local_experts=128,
                                layer_types=["sliding_attention", "full_attention"] * 18),
    "minimax_m2/MiniMax-M2": dict(max_position_embeddings=204800, attention_dropout=0.0, output_router_logits=False,
                                  router_aux_loss_coef=0.001, router_jitter_noise=0.0, sliding_window=None),
}  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_taken(name):
    config = PUBLISHED[name]
    family, shape = family_of(config)
    assert (family.model_type, shape.num_layers) == (config["model_type"], config["num_hidden_layers"])


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_model_of_an_example_is_taken(name):
    folder, model = name.split("/")
    config = json.loads((EXAMPLES / folder / "models" / model / "config.json").read_text()) | LARGER[name]
    assert family_of(config)[1].num_layers == config["num_hidden_layers"]
