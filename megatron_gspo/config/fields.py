"""Names, types, bounds, defaults and docstrings of the fields of section dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import annotated_types

from megatron_gspo.config.config_error import show

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string", Any: "anything"}
_SEQUENCES = (list, tuple)


@dataclasses.dataclass(frozen=True)
class Key:
    """One config key."""

    name: str  # dotted
    type: str  # in words, with bounds
    default: str  # in YAML's spelling; "required" where there is none
    description: str


def keys(section: type, prefix: str = "") -> Iterator[Key]:
    """Every leaf key of a section dataclass, in order; a section's own keys come before its
    subsections'.
    """
    subsections = []
    texts = docstrings(section)
    for name, annotation in field_types(section).items():
        subsection = section_of(annotation)
        if subsection is not None:
            subsections.append((subsection, f"{prefix}{name}."))
        else:
            yield Key(
                prefix + name,
                describe_type(annotation),
                _default(section, name),
                texts.get(name, ""),
            )
    for subsection, inner in subsections:
        yield from keys(subsection, inner)


@functools.cache
def field_types(section: type) -> dict[str, Any]:
    """Field name -> resolved annotation, `Annotated` kept."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@functools.cache
def docstrings(section: type) -> dict[str, str]:
    """Field name -> the string literal below the field, on one line. Base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _own_docstrings(base)
    return texts


def _own_docstrings(section: type) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(content))
            ):
                texts[name] = " ".join(content.split())
    return texts


def section_of(annotation: Any) -> type | None:
    """The section dataclass in an annotation (`X`, `X | None` or `tuple[X, ...]`), or None."""
    for option in _options(_bare(annotation)):
        item = typing.get_args(option)[0] if is_list(option) else option
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            return item
    return None


def is_list(annotation: Any) -> bool:
    """Whether an annotation is a list or tuple."""
    return typing.get_origin(_bare(annotation)) in _SEQUENCES


def required(section: type) -> list[str]:
    """Fields without a default."""
    return [field.name for field in dataclasses.fields(section) if _has_no_default(field)]


def default_of(section: type, name: str) -> Any:
    """A field's default; KeyError for a required one."""
    field = section.__dataclass_fields__[name]  # type: ignore[attr-defined]
    if _has_no_default(field):
        raise KeyError(name)
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def describe_type(annotation: Any) -> str:
    """A type and its bounds in words, e.g. `integer >= 1 or null`."""
    options = _options(annotation)
    text = " or ".join(_name(option) for option in options if option is not type(None))
    return text + (" or null" if type(None) in options else "")


def choices(annotation: Any) -> list[str]:
    """The allowed words of a field, [] where it has none."""
    words: list[str] = []
    for option in _options(annotation):
        if typing.get_origin(option) is typing.Literal:
            words.extend(typing.get_args(option))
    return words


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = ", ".join(bound for item in arguments[1:] if (bound := _bound(item)))
        return f"{_name(arguments[0])} {bounds}".rstrip()
    if origin is typing.Literal:
        return "one of " + ", ".join(arguments)
    if origin in _SEQUENCES:
        name = "list" if origin is list or arguments[-1] is ... else "pair"
        return f"{name} of {_plural(_name(_bare(arguments[0])))}"
    if origin is dict:
        return "mapping"
    if section_of(annotation) is not None:
        return "section"
    return _NAMES.get(annotation, str(annotation))


def _bare(annotation: Any) -> Any:
    """An annotation without the bounds of `Annotated`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation


def _plural(name: str) -> str:
    head, space, rest = name.partition(" ")
    return f"{head}s{space}{rest}"


def _bound(item: object) -> str:
    match item:
        case annotated_types.MinLen():
            return f"with at least {item.min_length}"
        case annotated_types.Ge():
            return f">= {item.ge}"
        case annotated_types.Gt():
            return f"> {item.gt}"
        case annotated_types.Le():
            return f"<= {item.le}"
        case annotated_types.Lt():
            return f"< {item.lt}"
    return ""


def _default(section: type, name: str) -> str:
    if name in getattr(section, "by_preset", ()):
        return "by preset"
    return "required" if name in required(section) else show(default_of(section, name))


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
