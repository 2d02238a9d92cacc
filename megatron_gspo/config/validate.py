"""Validation of plain data against section dataclasses.

The only module of the config that uses pydantic.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megatron_gspo.config.config_error import MISSING, ConfigError
from megatron_gspo.config.fields import (
    choices,
    describe_type,
    field_types,
    is_list,
    keys,
    required,
    section_of,
)

T = TypeVar("T")

# Set on the outermost dataclass, as `__pydantic_config__`; sections inherit it. Strict: no type is
# coerced, except an integer to a float.
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def validate(section: type[T], data: dict[str, Any], *, page: str = "docs/config.md") -> T:
    """An instance of a section dataclass. Raises ConfigError for the first fault: unknown keys,
    types and bounds.

    page: documentation of the keys, for messages.
    """
    try:  # as JSON, which strict validation builds dataclasses from
        adapter: TypeAdapter[T] = _adapter(section)  # type: ignore[arg-type]
        return adapter.validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise _first_fault(section, error, page) from None


@functools.cache
def _adapter(section: type) -> TypeAdapter[Any]:
    return TypeAdapter(section)


def _first_fault(model: type, error: ValidationError, page: str) -> ConfigError:
    """A pydantic error as ConfigError.

    Unknown keys come first: they often explain a missing one.
    """
    faults = sorted(
        error.errors(include_url=False), key=lambda fault: fault["type"] not in _UNKNOWN
    )
    fault = faults[0]
    key, annotation = _locate(model, fault["loc"])
    value = fault["input"]
    if fault["type"] in _UNKNOWN:
        known = [entry.name for entry in keys(model)] + list(field_types(model))
        fix = _suggest(key, known) or f"remove it, or see {page} for the keys"
        return ConfigError(key, value, "is not a key", fix)
    if fault["type"] == "missing":
        return ConfigError(key, MISSING, "is missing", f"set it: {_expected(annotation)}")
    if fault["type"] == "value_error":
        return _from_section(key, value, str(fault["ctx"]["error"]))
    words = choices(annotation)
    close = difflib.get_close_matches(str(value), words, n=1)
    hint = f", perhaps {close[0]}" if close else ""
    expected = _expected(annotation)
    quoted = ""
    if isinstance(value, str) and not words:
        quoted = ", without quotes"
    elif isinstance(value, (bool, int, float)) and expected.startswith("string"):
        quoted = ", in quotes"  # YAML reads no, on and 2026 as other types
    return ConfigError(key, value, "is not allowed", f"set {expected}{hint}{quoted}")


def _from_section(section: str, values: object, message: str) -> ConfigError:
    """The ValueError of a section's `__post_init__`, "key = value problem: fix", under the key
    of the config.
    """
    head, _, fix = message.partition(": ")
    key, _, rest = head.partition("=")
    key = key.strip()
    if not key.isidentifier() or not isinstance(values, dict):
        return ConfigError(section, MISSING, head, fix or "change it")
    value = values.get(key)
    problem = rest.strip().removeprefix(repr(value)).strip() or "is not allowed"
    fix = re.sub(r"set (\w+)=True", rf"set {section}.\1: true", fix)
    return ConfigError(f"{section}.{key}", value, problem, fix or "change it")


def _locate(model: type, location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Dotted key and annotation of a pydantic location, without the union branches that
    pydantic adds.
    """
    names: list[str] = []
    annotation: Any = model
    current: type | None = model
    for step in location:
        if current is None:
            break
        names.append(str(step))
        if isinstance(step, int):  # an item of a list of sections
            annotation = current
            continue
        annotation = field_types(current).get(step)
        if annotation is None:
            break
        current = section_of(annotation)
    return ".".join(names) or "config", annotation


def _expected(annotation: Any) -> str:
    if annotation is None:
        return "a mapping of keys"
    section = section_of(annotation)
    if section is None:
        return describe_type(annotation)
    names = required(section)
    text = "a list of sections" if is_list(annotation) else "a section"
    return f"{text} with at least {', '.join(names)}" if names else text


def _suggest(key: str, known: list[str]) -> str:
    """The known key that was probably meant, as a question; empty if none is close."""
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = (
        same_leaf
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
        or [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)]
    )
    return f"did you mean {close[0]}?" if close else ""
