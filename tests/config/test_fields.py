"""Types, defaults and docstrings that are read from section dataclasses; every default has one
home.
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import Config
from megatron_gspo.config.fields import (
    docstrings,
    field_types,
    keys,
    section_of,
)


def sections(section: type = Config) -> list[type]:
    inner = [section_of(annotation) for annotation in field_types(section).values()]
    return [section] + [found for part in inner if part is not None for found in sections(part)]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_has_a_docstring(section: type) -> None:
    leaves = [
        name for name, annotation in field_types(section).items() if section_of(annotation) is None
    ]
    texts = docstrings(section)
    assert [name for name in leaves if not texts.get(name, "").rstrip().endswith(".")] == []
    assert dataclasses.is_dataclass(section) and section.__dataclass_params__.frozen
    assert section.__doc__ and not section.__doc__.startswith(section.__name__ + "(")


def test_a_default_of_the_algorithm_is_the_presets() -> None:
    found = {key.name: key.default for key in keys(Config)}
    assert found["algorithm.epsilon_low"] == found["algorithm.loss_agg_mode"] == "by preset"
    assert found["algorithm.max_num_gen_batches"] == "4" and found["run_dir"] == "required"
