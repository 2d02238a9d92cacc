"""Windows of Qwen's attention layers."""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError, family_of
from tests.support.tiny_models import tiny_config


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
    tiny = tiny_config(kind, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    if kind != "moe":  # whose layers all read sliding_window
        assert [window is not None for window in windows] == [
            k == "sliding_attention" for k in tiny.layer_types
        ]
    config = tiny.to_dict()
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
