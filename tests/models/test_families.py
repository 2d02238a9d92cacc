"""The tables of names against checkpoints that Transformers itself wrote, and the configs that
are refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gspo.models import ModelError, check_names, family_of, hugging_face_names
from megatron_gspo.models.families import names_of_own_type
from tests.models.test_config_defaults import language_keys
from tests.support.tiny_models import tiny_config

LINEAR = ["linear_attention"] * 4


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("moe", dict(model_type="llama"), "model_type='llama' .* known: deepseek_v3, .*, qwen3"),
        ("moe", dict(attention_bias=True), "attention_bias=true"),
        ("moe", dict(layer_types=LINEAR), "layer_types=.*linear_attention"),
        (
            "moe",
            dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e6)),
            "rope_type='dynamic'",
        ),
        ("moe", dict(num_local_experts=4, num_experts=8), "num_experts=8 and num_local_experts=4"),
        ("moe", dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size=8"),
        ("dense", dict(partial_rotary_factor=0.5, rope_parameters=None), "partial_rotary_factor"),
        ("deepseek", dict(head_dim=20), "head_dim=20 in a deepseek_v3 config.json .* known: 8"),
        (
            "glm_lite",
            dict(mlp_layer_types=None, first_k_dense_replace=2),
            "first_k_dense_replace=2 .* known: 1",
        ),
        ("gpt_oss", dict(rope_parameters={"full_attention": {}}), "with full_attention={} "),
        ("gpt_oss", dict(hidden_act="gelu"), "hidden_act='gelu' .* known: 'silu'"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0 .* known: 1.702"),
        ("gpt_oss", dict(layer_types=["full_attention"] * 3), "layer_types=.* each of 4 layers"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window=None .* give the window"),
        ("next", dict(linear_num_value_heads=6), "linear_num_value_heads=6 .* no multiple of"),
        ("qwen35", dict(num_experts=4), "num_experts=4 in a qwen3_5 config.json .* known: 0"),
        ("qwen35_moe_text", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_is_computed_otherwise_is_refused(kind, changes, message):
    config = tiny_config(kind).to_dict()
    language_keys(config).update(changes)
    with pytest.raises(ModelError, match=message):
        family_of(config)


def test_null_for_the_language_model_is_refused():
    with pytest.raises(ModelError, match="model_type=None in the text_config of a qwen3_5 config"):
        family_of(tiny_config("qwen35").to_dict() | {"text_config": None})


def test_kimi_k2_is_deepseek_v3_under_another_name():
    config = tiny_config("deepseek").to_dict()
    deepseek = family_of(config)
    kimi = family_of(config | {"model_type": "kimi_k2"})
    assert list(hugging_face_names(*deepseek)) == list(hugging_face_names(*kimi))
    assert replace(deepseek[1], model_type="") == replace(kimi[1], model_type="")


def test_names_of_minimax_in_transformers():
    family, _ = family_of(tiny_config("minimax").to_dict())
    for stored, name in {
        "experts.3.w1.weight": "experts.3.gate_proj.weight",
        "experts.3.w2.weight": "experts.3.down_proj.weight",
        "experts.3.w3.weight": "experts.3.up_proj.weight",
        "e_score_correction_bias": "e_score_correction_bias",
    }.items():
        renamed = family.name_in_transformers(f"model.layers.1.block_sparse_moe.{stored}")
        assert renamed == f"model.layers.1.mlp.{name}"


def test_decay_rates_and_the_norm_behind_them_are_kept_in_float32():
    start = "model.language_model.layers.{}.linear_attn."
    expected = {start.format(layer) + name for layer in (0, 2) for name in ("A_log", "norm.weight")}
    assert names_of_own_type([], *family_of(tiny_config("qwen35").to_dict())) == expected


def test_a_missing_key_is_named():
    config = tiny_config("moe").to_dict()
    del config["hidden_size"]
    with pytest.raises(ValueError, match="of a qwen3_moe model lacks the key 'hidden_size'"):
        family_of(config)


def test_missing_and_extra_names_are_told():
    family, shape = family_of(tiny_config("moe").to_dict())
    names = set(hugging_face_names(family, shape))
    missing = "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(ValueError, match=rf"lacks {missing} \(1 missing\)"):
        check_names(names - {missing}, family, shape)
    with pytest.raises(
        ValueError, match=r"has model.layers.9.extra, which the model does not use \(1 extra\)"
    ):
        check_names(names | {"model.layers.9.extra"}, family, shape)


def test_tied_models_may_carry_the_output_weight():
    family, shape = family_of(tiny_config("dense", tie_word_embeddings=True).to_dict())
    check_names({*hugging_face_names(family, shape), "lm_head.weight"}, family, shape)
