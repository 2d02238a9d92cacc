"""The tables of refused Megatron options: against the keywords that the package sets, and
against the docs.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.config import Config
from megatron_gspo.mcore import megatron_refusals, model, policy
from megatron_gspo.mcore.megatron_options import resolve_options
from megatron_gspo.mcore.megatron_refusals import (
    key_that_sets,
    reason_to_refuse,
    refused_names,
)
from tests.mcore.test_model import shape_of
from tests.support.configs import adam, model_config, parallel

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
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
    found: dict[str, Any] = {}

    def construct(cls: Any, keywords: Mapping[str, Any], options: Any) -> None:
        found.update(keywords)

    for module in (model, policy):
        monkeypatch.setattr(module, "construct", construct)
    for granularity in (None, "full", "selective"):
        model.transformer_config(
            shape_of(), parallel(), model_config(recompute_granularity=granularity)
        )
    policy.optimizer_config(adam(1e-3), model_config(), parallel())
    policy.ddp_config(parallel())
    return found


def test_every_option_that_we_set_is_refused_or_a_default_that_the_section_overrides(our_keywords):
    assert len(our_keywords) >= 50
    assert set(our_keywords) - refused_names() == DEFAULTS


def test_our_own_values_are_not_refused(our_keywords):
    """Except where the value depends on the device or the schedule."""
    refused = {name for name, value in our_keywords.items() if reason_to_refuse(name, value)}
    assert refused == {"overlap_p2p_comm", "batch_p2p_comm", "use_cpu_initialization"}


def test_the_keys_that_set_options_exist():
    sections = typing.get_type_hints(Config)
    for key in {key for name in refused_names() if (key := key_that_sets(name))}:
        section, _, field = key.partition(".")
        assert field in {item.name for item in dataclasses.fields(sections[section])}, key


def section() -> str:
    return (
        PAGE.read_text(encoding="utf-8").partition("## Megatron options\n")[2].partition("\n## ")[0]
    )


def test_the_docs_show_options_that_are_passed_through():
    example = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section(), flags=re.DOTALL)[0])[
        "megatron"
    ]
    found = resolve_options(example)
    assert found.transformer | found.optimizer | found.ddp == example


def test_the_docs_list_options_that_are_refused():
    rows = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", section(), flags=re.MULTILINE))
    names = {
        name: reason for options, reason in rows.items() for name in re.findall(r"`(\w+)`", options)
    }
    assert len(names) >= 12 and set(names) <= refused_names()
    for name, reason in names.items():
        assert (key_that_sets(name) is not None) == (reason == "another key sets it"), name
        assert (name in megatron_refusals._BYPASSES_HOOKS) == reason.startswith("bypasses"), name
