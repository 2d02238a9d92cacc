"""The tables of names against checkpoints that Transformers itself wrote, and the configs that
are refused.
"""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, check_names, family_of, hugging_face_names, read_config
from tests.support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(model_type="llama"),
            r"model_type='llama' .* known: deepseek_v3, .*, qwen3, qwen3_5, .*, qwen3_next$",
        ),
        (
            dict(model_type="minimax"),
            "model_type='minimax' in config.json is not supported; known: ",
        ),
        (dict(model_type=None), "model_type=None"),
        (dict(attention_bias=True), "attention_bias=true"),
        (dict(layer_types=["linear_attention"] * 4), "layer_types=.*linear_attention"),
        (
            dict(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}),
            "rope_type='dynamic'",
        ),
        (
            dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}),
            "rope_type='linear'",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        family_of({**tiny_config("moe").to_dict(), **change})


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size"]
)
def test_a_missing_key_is_named(key):
    config = tiny_config("moe").to_dict()
    del config[key]
    with pytest.raises(ValueError, match=f"config.json of a qwen3_moe model lacks the key '{key}'"):
        family_of(config)


def test_a_config_without_a_number_of_experts_is_refused():
    config = {
        k: v
        for k, v in tiny_config("moe").to_dict().items()
        if k not in ("num_experts", "num_local_experts")
    }
    with pytest.raises(ValueError, match="lacks the key 'num_experts'"):
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


def test_config_file_errors_name_the_file(tmp_path):
    with pytest.raises(ModelError, match="no config.json there"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        read_config(tmp_path)
