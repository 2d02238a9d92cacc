"""The tables of refused Megatron options against the keywords that the package sets."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.mcore import model, policy
from megatron_gspo.mcore.megatron_refusals import (
    key_that_sets,
    refused_names,
)
from tests.mcore.test_model import shape_of
from tests.support.configs import adam, model_config, parallel

# Defaults of ours that a user may override.
DEFAULTS = {
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "grad_reduce_in_fp32",
    "check_for_nan_in_grad",
}


@pytest.fixture
def our_keywords(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every option that the package itself sets, with its value, for a mixture of experts."""
    taken: dict[str, Any] = {}

    def construct(cls: Any, keywords: Mapping[str, Any], options: Any) -> None:
        taken.update(keywords)

    for module in (model, policy):
        monkeypatch.setattr(module, "construct", construct)
    for granularity in (None, "full", "selective"):
        model.transformer_config(
            shape_of(), parallel(), model_config(recompute_granularity=granularity)
        )
    policy.optimizer_config(adam(1e-3), model_config(), parallel())
    policy.ddp_config(parallel())
    return taken


def test_every_option_that_we_set_is_refused_or_a_default_that_the_section_overrides(our_keywords):
    assert len(our_keywords) >= 50
    assert set(our_keywords) - refused_names() == DEFAULTS


def test_the_keys_that_set_options_exist():
    sections = typing.get_type_hints(Config)
    for key in {key for name in refused_names() if (key := key_that_sets(name))}:
        section, _, field = key.partition(".")
        assert field in {item.name for item in dataclasses.fields(sections[section])}, key
