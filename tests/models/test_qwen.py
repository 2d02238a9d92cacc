"""Sizes and layer facts of Qwen's models."""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, family_of
from tests.support.tiny_models import tiny_config


def test_sizes_are_read_from_the_config():
    _, shape = family_of(
        tiny_config("moe", norm_topk_prob=False, mlp_only_layers=[2], rope_theta=5e5).to_dict()
    )
    assert (
        shape.num_layers,
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_query_groups,
    ) == (4, 32, 4, 2)
    assert (shape.head_dim, shape.ffn_hidden_size, shape.moe_ffn_hidden_size, shape.vocab_size) == (
        16,
        48,
        16,
        96,
    )
    assert (shape.num_experts, shape.experts_per_token, shape.router.normalize) == (8, 2, False)
    assert shape.moe_layers == (True, True, False, True)
    assert shape.rotary.base == 5e5 and shape.rms_norm_eps == 1e-6 and not shape.tied_embeddings


def test_rope_theta_of_a_config_of_transformers_4():
    config = {
        key: value
        for key, value in tiny_config("dense").to_dict().items()
        if key != "rope_parameters"
    }
    _, shape = family_of({**config, "rope_theta": 123.0, "rope_scaling": None})
    assert shape.rotary.base == 123.0


def test_a_shared_expert_has_a_gate():
    _, shape = family_of(tiny_config("shared").to_dict())
    assert (shape.shared_expert_size, shape.shared_expert_gate, shape.attention_bias) == (
        24,
        True,
        True,
    )
    assert not shape.query_key_norms and shape.mixers == ("attention",) * 4


@pytest.mark.parametrize(
    "kind, windows",
    [
        ("dense", (None, 7, 7, 7)),
        ("moe", (7, 7, 7, 7)),
        ("shared", (7, None, None, None)),
    ],
)
def test_windows_are_where_transformers_has_them(kind, windows):
    """max_window_layers is the first layer with a window of Qwen3, and the first of Qwen2-MoE
    that can have none.
    """
    found = tiny_config(kind, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    if kind != "moe":  # whose layers all read sliding_window
        assert [window is not None for window in windows] == [
            k == "sliding_attention" for k in found.layer_types
        ]
    config = found.to_dict()
    for given in (config, {key: value for key, value in config.items() if key != "layer_types"}):
        shape = family_of(given)[1]
        assert shape.windows == windows
        assert shape.mixers == tuple(
            "windowed_attention" if window else "attention" for window in windows
        )
    assert set(family_of(config | dict(use_sliding_window=False, layer_types=None))[1].windows) == {
        None
    }


def test_windows_that_contradict_each_other_are_refused():
    config = tiny_config("moe", use_sliding_window=True, sliding_window=7).to_dict()
    with pytest.raises(
        ModelError, match="layer_types=.*full_attention.*; known: .*sliding_attention"
    ):
        family_of(config | dict(layer_types=["full_attention"] * 4))
    with pytest.raises(
        ModelError, match="sliding_window=None in config.json has layers of sliding_attention"
    ):
        family_of(tiny_config("dense").to_dict() | dict(layer_types=["sliding_attention"] * 4))


def test_yarn():
    yarn = dict(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
    )
    for kind in ("dense", "moe", "shared"):
        rotary = family_of(tiny_config(kind).to_dict() | dict(rope_parameters=yarn))[1].rotary
        assert rotary.yarn is not None and (rotary.yarn.factor, rotary.yarn.trained_length) == (
            4.0,
            32768,
        )
        assert rotary.cosine_scale == pytest.approx(1.1386294361119891)  # 0.1 ln 4 + 1
