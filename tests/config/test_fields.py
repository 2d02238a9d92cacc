"""Types, defaults and docstrings that are read from section dataclasses; every default has one
home.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt, MinLen

from megatron_gspo.config import Config, RolloutConfig, SamplingParams
from megatron_gspo.config.fields import (
    choices,
    default_of,
    describe_type,
    docstrings,
    field_types,
    keys,
    required,
    section_of,
)

PACKAGE = Path(__file__).parents[2] / "megatron_gspo"
PYDANTIC = "validate.py"


@pytest.mark.parametrize(
    "annotation, text",
    [
        (bool | str, "true or false or string"),
        (Annotated[int, Ge(1)] | None, "integer >= 1 or null"),
        (Annotated[float, Gt(0), Lt(1)], "number > 0, < 1"),
        (Literal["a", "b"] | None, "one of a, b or null"),
        (tuple[Annotated[int, Ge(1)], ...], "list of integers"),
        (tuple[tuple[float, float], ...] | None, "list of pairs of numbers or null"),
        (Annotated[tuple[int, ...], MinLen(1)], "list of integers with at least 1"),
        (dict[str, Any], "mapping"),
        (RolloutConfig | None, "section or null"),
    ],
)
def test_types_in_words(annotation: Any, text: str) -> None:
    assert describe_type(annotation) == text


def test_choices() -> None:
    assert choices(Literal["a", "b"] | None) == ["a", "b"] and choices(int) == []


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


def test_inherited_fields_keep_their_docstrings() -> None:
    assert docstrings(RolloutConfig)["top_k"] == docstrings(SamplingParams)["top_k"] != ""


def test_defaults_and_required_fields() -> None:
    assert (
        default_of(RolloutConfig, "environment_options") == {}
        and default_of(RolloutConfig, "top_p") == 1.0
    )
    assert required(RolloutConfig) == ["rollout_batch_size"]
    with pytest.raises(KeyError):
        default_of(RolloutConfig, "rollout_batch_size")


def test_a_default_of_the_algorithm_is_the_presets() -> None:
    found = {key.name: key.default for key in keys(Config)}
    assert found["algorithm.epsilon_low"] == found["algorithm.loss_agg_mode"] == "by preset"
    assert found["algorithm.max_num_gen_batches"] == "4" and found["run_dir"] == "required"


def dataclass_fields(file: Path) -> list[tuple[str, dict[str, str]]]:
    """(class, its fields with a default) of every dataclass in a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.dump(d) for d in node.decorator_list
        ):
            body = [
                part
                for part in node.body
                if isinstance(part, ast.AnnAssign) and part.value is not None
            ]
            found.append(
                (node.name, {ast.unparse(part.target): ast.unparse(part.value) for part in body})
            )  # type: ignore[arg-type]
    return found


def test_no_dataclass_of_the_package_repeats_a_section() -> None:
    """Two equal names with equal defaults may be a coincidence; three are a copy of a section."""
    own = {
        (name, dataclass.__name__) for dataclass in sections() for name in field_types(dataclass)
    }
    names = {name for name, _ in own}
    copies = []
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name in ("config", "algorithms"):
            continue
        for cls, fields in dataclass_fields(file):
            shared = sorted(names & fields.keys())
            if len(shared) >= 3:
                copies.append(f"{file.relative_to(PACKAGE)}:{cls}: {', '.join(shared)}")
    assert copies == []


def test_only_the_validation_uses_pydantic() -> None:
    users = [
        file.name
        for file in (PACKAGE / "config").glob("*.py")
        if "pydantic import" in file.read_text()
    ]
    assert users == [PYDANTIC]
