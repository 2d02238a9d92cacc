"""Key, type, default and meaning of every field: the source of `--help`, docs/config.md and errors."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_gspo.config.base import show

_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """One row of the reference."""

    name: str  # dotted
    type: str
    default: str  # as YAML spells it; "required" where there is none
    description: str


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every leaf key of a config model, in order; a section's own keys before its subsections'."""
    sections = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            sections.append((section, f"{prefix}{name}."))
        else:
            yield Key(prefix + name, describe_type(field), _default(field), field.description or "")
    for section, inner in sections:
        yield from keys(section, inner)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class behind an annotation (`X` or `X | None`), or None."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def describe_type(field: FieldInfo) -> str:
    """A field's type and bounds in words, e.g. `whole number >= 1 or null`."""
    options = _options(field.annotation)
    words = [_name(option) for option in options if option is not type(None)]
    text = " or ".join(words)
    bounds = [bound for item in field.metadata if (bound := _bound(item))]
    if bounds:
        text += " " + ", ".join(bounds)
    return text + (" or null" if type(None) in options else "")


def choices(field: FieldInfo) -> list[str]:
    """The allowed words of a field, [] where it isn't a choice."""
    found = [typing.get_args(o) for o in _options(field.annotation) if typing.get_origin(o) is typing.Literal]
    return [word for group in found for word in group]


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(arguments)
    if origin is list:
        return f"list of {_name(arguments[0])}s"
    if origin is dict:
        return "mapping"
    if section_of(annotation) is not None:
        return "section"
    return _NAMES.get(annotation, str(annotation))


def _bound(item: Any) -> str:
    match item:
        case annotated_types.Ge():
            return f">= {item.ge}"
        case annotated_types.Gt():
            return f"> {item.gt}"
        case annotated_types.Le():
            return f"<= {item.le}"
        case annotated_types.Lt():
            return f"< {item.lt}"
    return ""


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else show(field.get_default(call_default_factory=True))


def help_text(model: type[BaseModel], usage: str) -> str:
    """The text of `--help`."""
    lines = [usage, "", "Keys of CONFIG.yaml, each with its type, default and meaning:"]
    section = None
    for key in keys(model):
        head = key.name.rpartition(".")[0]
        if head != section:
            lines.append("")
            section = head
        lines.append(
            f"  {key.name}  ({key.type}; default {key.default})".replace("; default required", "; required")
        )
        lines.append(f"      {key.description}")
    return "\n".join(lines)


_INTRO = """# Config reference

Generated from `megatron_gspo/config/` by `make docs`; edit the fields there, not this page.

A config is one YAML file; `key.sub=value` on the command line overrides it, the value read as YAML
(`1e-6` is a number, `null` is null, `'[1, 4]'` a list). Unknown keys, wrong types (`"8"` is not `8`) and
choices that contradict each other stop the run before any allocation. Paths are relative to the working
directory. The `config.yaml` of a finished run is a config too: its `environment` section is ignored.
"""


def markdown(model: type[BaseModel]) -> str:
    """The text of docs/config.md."""
    lines, section = [_INTRO.rstrip()], None
    for key in keys(model):
        head, _, leaf = key.name.rpartition(".")
        if head != section:
            title = f"## {head}" if head else "## Top level"
            lines += ["", title, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
            section = head
        cells = (
            f"`{leaf}`",
            key.type,
            f"`{key.default}`" if key.default != "required" else "required",
            key.description,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
