"""gpt-oss: layer facts of the published config, and configs that are near it but not it."""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, family_of
from megatron_gspo.models.rotary import Rotary, Yarn

# openai/gpt-oss-20b, what matters of it
CONFIG = dict(
    model_type="gpt_oss",
    hidden_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_local_experts=32,
    num_experts_per_tok=4,
    vocab_size=201088,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000,
    attention_bias=True,
    hidden_act="silu",
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    layer_types=["sliding_attention", "full_attention"] * 12,
    rope_scaling=dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
)


def test_published_config():
    family, shape = family_of(CONFIG)
    assert shape.windows == (128, None) * 12 and set(shape.mixers) == {"sink_attention"}
    assert shape.moe_layers == (True,) * 24 and (shape.num_experts, shape.experts_per_token) == (
        32,
        4,
    )
    assert (
        shape.attention_bias
        and shape.linear_bias
        and not shape.query_key_norms
        and shape.glu_limit == 7.0
    )
    stretched = 0.1 * 3.4657359027997265 + 1  # ln 32
    assert shape.rotary == Rotary(
        150000.0, 64, yarn=Yarn(32.0, 4096, 32.0, 1.0, False, pytest.approx(stretched))
    )
    assert family.stacks_experts
    assert "layers.0.mlp.experts.down_proj[31]" in {
        f"layers.0.{name}" for rule in family.layer_rules(shape, 0) for name in rule.names(0, 31)
    }


def test_what_a_config_leaves_out_is_what_the_published_ones_have():
    short = {
        key: value
        for key, value in CONFIG.items()
        if key
        not in (
            "layer_types",
            "rope_scaling",
            "rope_theta",
            "attention_bias",
            "swiglu_limit",
        )
    }
    assert family_of(short)[1] == family_of(CONFIG)[1]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(hidden_act="gelu"),
            "hidden_act='gelu' in a gpt_oss config.json is not supported; known: 'silu'",
        ),
        (dict(attention_bias=False), "attention_bias=False .* known: True"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha=1.0 .* known: 1.702"),
        (dict(swiglu_limit=None), "swiglu_limit=None .* give a number above 0"),
        (
            dict(rope_scaling=dict(rope_type="longrope")),
            "rope_type='longrope' .* known: yarn, default",
        ),
        (dict(layer_types=["full_attention"] * 23), "layer_types=.* each of 24 layers"),
        (
            dict(layer_types=["chunked_attention"] * 24),
            "layer_types=.*chunked_attention.* full_attention or sliding",
        ),
        (dict(sliding_window=None), "sliding_window=None .* give the window"),
        (dict(sliding_window=0), "sliding_window=0 .* give the window"),
    ],
)
def test_near_configs_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        family_of({**CONFIG, **change})
