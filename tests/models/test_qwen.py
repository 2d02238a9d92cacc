"""Sizes and layer facts of Qwen's models."""

from __future__ import annotations

from megatron_gspo.models import family_of
from tests.support.tiny_models import tiny_config


def test_sizes_are_read_from_the_config():
    _, shape = family_of(tiny_config("moe", norm_topk_prob=False, mlp_only_layers=[2], rope_theta=5e5).to_dict())
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads, shape.num_query_groups) == (4, 32, 4, 2)
    assert (shape.head_dim, shape.ffn_hidden_size, shape.moe_ffn_hidden_size, shape.vocab_size) == (16, 48, 16, 96)
    assert (shape.num_experts, shape.experts_per_token, shape.router.normalize) == (8, 2, False)
    assert shape.moe_layers == (True, True, False, True)
    assert shape.rotary.base == 5e5 and shape.rms_norm_eps == 1e-6 and not shape.tied_embeddings


def test_rope_theta_of_a_config_of_transformers_4():
    config = {key: value for key, value in tiny_config("dense").to_dict().items() if key != "rope_parameters"}
    _, shape = family_of({**config, "rope_theta": 123.0, "rope_scaling": None})
    assert shape.rotary.base == 123.0


def test_a_shared_expert_has_a_gate():
    _, shape = family_of(tiny_config("shared").to_dict())
    assert (shape.shared_expert_size, shape.shared_expert_gate, shape.attention_bias) == (24, True, True)
    assert not shape.query_key_norms and shape.mixers == ("attention",) * 4
