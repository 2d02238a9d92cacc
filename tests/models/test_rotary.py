"""Frequencies and scales of rotary embeddings, against Transformers and by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_gspo.models.config_reader import rotary_of

TYPES = ("default", "yarn")
YARN = dict(
    rope_type="yarn", rope_theta=50000.0, factor=32.0, original_max_position_embeddings=4096
)


@pytest.mark.parametrize(
    "parameters",
    [
        dict(rope_type="default", rope_theta=50000.0),
        YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        YARN | dict(mscale=0.7, mscale_all_dim=1.3, beta_fast=1, beta_slow=1),
        YARN | dict(factor=40.0, beta_fast=16, beta_slow=2, truncate=False, mscale=0.7),
        YARN | dict(factor=None, mscale_all_dim=1.0),
        YARN | dict(attention_factor=1.25),
        YARN | dict(factor=0.5),
    ],
    ids=str,
)
def test_frequencies_and_scales_are_those_of_transformers(parameters):
    config = DeepseekV3Config(
        qk_rope_head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )
    rotary = rotary_of(config.to_dict(), 64, types=TYPES)
    if parameters["rope_type"] == "default":
        expected = 1.0 / 50000.0 ** (torch.arange(0, 64, 2).float() / 64)
        scale = 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(rotary.frequencies(), expected, rtol=1e-6, atol=0)
    assert rotary.cosine_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    ("all_dims", "by_hand"), [(1.0, 1.3465735902799727**2), (0.5, 1.1732867951399863**2), (0, 1)]
)
def test_the_scale_of_scores_by_hand(all_dims, by_hand):
    """0.1 ln 32 = 0.34657359."""
    parameters = YARN | dict(mscale=1.0, mscale_all_dim=all_dims)
    assert rotary_of({"rope_parameters": parameters}, 64, types=TYPES).score_scale == pytest.approx(
        by_hand, rel=1e-12
    )
