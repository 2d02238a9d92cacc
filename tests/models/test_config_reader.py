"""What is read from a config.json: here the rotary embedding."""

from __future__ import annotations

import pytest

from megatron_gspo.models import ModelError
from megatron_gspo.models.config_reader import rotary_of
from megatron_gspo.models.rotary import Rotary

TYPES = ("default", "yarn")


def test_both_generations_of_transformers():
    assert rotary_of({}, 8) == Rotary(10000.0, 8)
    assert rotary_of({"rope_theta": 5}, 8) == Rotary(5.0, 8)
    assert rotary_of({"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_theta": 5}, 8).base == 7.0
    old = rotary_of({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
                     "rope_theta": 5}, 8, types=TYPES)  # fmt: skip
    assert old.base == 5.0 and old.yarn is not None and old.yarn.factor == 4


def test_an_unknown_type_is_refused_with_those_that_are_known():
    with pytest.raises(ModelError, match="rope_type='yarn' in config.json is not supported; only 'default' is"):
        rotary_of({"rope_scaling": {"type": "yarn"}}, 8)
    with pytest.raises(ModelError, match="rope_type='longrope' .*; known: default, yarn"):
        rotary_of({"rope_scaling": {"type": "longrope"}}, 8, types=TYPES)
