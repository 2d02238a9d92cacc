"""Layer facts of MiniMax-M2 and the names of its tensors."""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, check_names, family_of, hugging_face_names, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.model_shape import Router
from tests.support.model_shapes import MINIMAX_M2
from tests.support.tiny_models import save_tiny_model, tiny_config

CONFIG = tiny_config("minimax").to_dict()


def test_facts_of_the_published_model():
    _, shape = family_of(read_config(MINIMAX_M2))
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads, shape.num_query_groups) == (62, 3072, 48, 8)
    assert (shape.rotary.base, shape.rotary.dim, shape.head_dim) == (5e6, 64, 128)
    assert shape.mixers == ("joint_norm_attention",) * 62 and shape.moe_layers == (True,) * 62
    assert shape.router == Router("sigmoid", normalize=True, scaling=1.0, expert_bias=True)
    assert (shape.num_experts, shape.experts_per_token, shape.moe_ffn_hidden_size) == (256, 8, 1536)
    assert shape.carried == tuple(f"model.layers.{layer}." for layer in (62, 63, 64)) and not shape.shared_expert_size


def test_the_rotated_part_has_three_places():
    plain = {**CONFIG, "rope_parameters": None}
    assert family_of(plain)[1].rotary.dim == 16 and family_of(plain)[1].rotary.base == 5e6
    assert family_of({**plain, "rotary_dim": 4, "rope_theta": 9.0})[1].rotary.dim == 4
    assert family_of({**plain, "partial_rotary_factor": 0.25})[1].rotary.dim == 4
    assert family_of({**CONFIG, "rotary_dim": 4})[1].rotary.dim == 8  # as in Transformers, its own place first


@pytest.mark.parametrize(("key", "value"), [
    ("scoring_func", "softmax"), ("use_routing_bias", False), ("use_qk_norm", False), ("qk_norm_type", "per_head"),
    ("shared_intermediate_size", 8), ("hidden_act", "gelu"), ("attention_bias", True), ("router_jitter_noise", 0.1),
    ("sliding_window", 8), ("attn_type_list", [1, 0, 1, 1]),
])  # fmt: skip
def test_what_the_layers_cannot_represent_is_refused(key, value):
    with pytest.raises(ModelError, match=f"{key}=.* in a minimax_m2 config.json is not supported; known: "):
        family_of({**CONFIG, key: value})


def test_names_are_those_that_transformers_writes(tmp_path):
    family, shape = family_of(read_config(save_tiny_model(tmp_path, "minimax")))
    with CheckpointReader(tmp_path) as reader:
        check_names(reader.names, family, shape)
        assert sorted(hugging_face_names(family, shape)) == sorted(reader.names)


def test_names_in_transformers_models():
    family, _ = family_of(CONFIG)
    prefix = "model.layers.1."
    assert {stored: family.name_in_transformers(prefix + stored) for stored in (
        "block_sparse_moe.experts.3.w1.weight", "block_sparse_moe.experts.3.w2.weight",
        "block_sparse_moe.experts.3.w3.weight", "block_sparse_moe.e_score_correction_bias",
    )} == {
        "block_sparse_moe.experts.3.w1.weight": prefix + "mlp.experts.3.gate_proj.weight",
        "block_sparse_moe.experts.3.w2.weight": prefix + "mlp.experts.3.down_proj.weight",
        "block_sparse_moe.experts.3.w3.weight": prefix + "mlp.experts.3.up_proj.weight",
        "block_sparse_moe.e_score_correction_bias": prefix + "mlp.e_score_correction_bias",
    }  # fmt: skip
