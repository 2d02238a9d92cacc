"""Layer facts of MiniMax-M2 and the names of its tensors."""

from __future__ import annotations

from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.model_shape import Router
from tests.support.model_shapes import MINIMAX_M2
from tests.support.tiny_models import tiny_config

CONFIG = tiny_config("minimax").to_dict()


def test_facts_of_the_published_model():
    _, shape = family_of(read_config(MINIMAX_M2))
    assert (
        shape.num_layers,
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_query_groups,
    ) == (62, 3072, 48, 8)
    assert (shape.rotary.base, shape.rotary.dim, shape.head_dim) == (5e6, 64, 128)
    assert shape.mixers == ("joint_norm_attention",) * 62 and shape.moe_layers == (True,) * 62
    assert shape.router == Router("sigmoid", normalize=True, scaling=1.0, expert_bias=True)
    assert (shape.num_experts, shape.experts_per_token, shape.moe_ffn_hidden_size) == (256, 8, 1536)
    assert (
        shape.carried == tuple(f"model.layers.{layer}." for layer in (62, 63, 64))
        and not shape.shared_expert_size
    )


def test_the_rotated_part_has_three_places():
    plain = {**CONFIG, "rope_parameters": None}
    assert family_of(plain)[1].rotary.dim == 16 and family_of(plain)[1].rotary.base == 5e6
    assert family_of({**plain, "rotary_dim": 4, "rope_theta": 9.0})[1].rotary.dim == 4
    assert family_of({**plain, "partial_rotary_factor": 0.25})[1].rotary.dim == 4
    # As in Transformers, its own place first.
    assert family_of({**CONFIG, "rotary_dim": 4})[1].rotary.dim == 8


def test_names_in_transformers_models():
    family, _ = family_of(CONFIG)
    prefix = "model.layers.1."
    assert {
        stored: family.name_in_transformers(prefix + stored)
        for stored in (
            "block_sparse_moe.experts.3.w1.weight",
            "block_sparse_moe.experts.3.w2.weight",
            "block_sparse_moe.experts.3.w3.weight",
            "block_sparse_moe.e_score_correction_bias",
        )
    } == {
        "block_sparse_moe.experts.3.w1.weight": prefix + "mlp.experts.3.gate_proj.weight",
        "block_sparse_moe.experts.3.w2.weight": prefix + "mlp.experts.3.down_proj.weight",
        "block_sparse_moe.experts.3.w3.weight": prefix + "mlp.experts.3.up_proj.weight",
        "block_sparse_moe.e_score_correction_bias": prefix + "mlp.e_score_correction_bias",
    }
