"""Layer facts of DeepSeek-V3, Moonlight, Kimi-K2 and GLM-4.7-Flash, and the names of their
tensors.
"""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, family_of, hugging_face_names
from megatron_gspo.models.model_shape import LatentSizes, Router
from tests.support.tiny_models import tiny_config


def test_facts_by_hand():
    _, shape = family_of(tiny_config("deepseek").to_dict())
    assert (
        shape.latent == LatentSizes(24, 16, 12, 16)
        and shape.latent.norm_eps == 1e-6 != shape.rms_norm_eps
    )
    assert shape.router == Router("sigmoid", True, 1.7, True, 4, 2)
    assert shape.mixers == ("latent_attention",) * 4 and shape.moe_layers == (
        False,
        True,
        True,
        True,
    )
    assert (shape.rotary.dim, shape.rotary.interleaved, shape.rotary.yarn.factor) == (8, True, 8.0)
    assert (shape.shared_expert_size, shape.shared_expert_gate, shape.carried) == (
        16,
        False,
        ("model.layers.4.",),
    )
    assert (shape.num_experts, shape.experts_per_token, shape.head_dim) == (12, 4, 20)


def test_one_group_is_no_group():
    """Moonlight: n_group and topk_group of 1; and a choice of all groups."""
    for changes in (dict(n_group=1, topk_group=1), dict(n_group=4, topk_group=4)):
        _, shape = family_of(tiny_config("moonlight", **changes).to_dict())
        assert (shape.router.groups, shape.router.chosen_groups) == (1, 1)
        assert shape.latent.query_rank is None and shape.rotary.yarn is None


def test_shared_experts_are_one_as_wide_as_all():
    assert family_of(tiny_config("glm_lite").to_dict())[1].shared_expert_size == 2 * 16
    assert (
        family_of(tiny_config("deepseek").to_dict() | {"n_shared_experts": None})[
            1
        ].shared_expert_size
        == 0
    )


def test_kimi_k2_is_deepseek_v3_under_another_name():
    config = tiny_config("deepseek").to_dict()
    (first, one), (second, other) = family_of(config), family_of(config | {"model_type": "kimi_k2"})
    assert list(hugging_face_names(first, one)) == list(hugging_face_names(second, other))
    assert one.router == other.router and one.latent == other.latent


def test_layers_of_glm_lite_are_listed_or_the_first_is_dense():
    config = tiny_config("glm_lite").to_dict()
    kinds = config | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    assert family_of(kinds)[1].moe_layers == (False, True, False, True)
    counted = {**config, "first_k_dense_replace": 2, "mlp_layer_types": None}
    with pytest.raises(ModelError, match="first_k_dense_replace=2"):  # Transformers doesn't read it
        family_of(counted)
    assert family_of({**counted, "first_k_dense_replace": 1})[1].moe_layers == (
        False,
        True,
        True,
        True,
    )
