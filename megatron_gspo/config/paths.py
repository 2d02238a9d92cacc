"""Config keys that hold paths, and their expansion."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, TypeVar

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.fields import field_types
from megatron_gspo.paths import PathError, expand_path

Section = TypeVar("Section")


class IsPath:
    """Marks a config key that holds a path, or a path followed by `:function` or `:split`."""


UserPath = Annotated[str, IsPath()]


def expand_paths(section: Section, prefix: str = "") -> Section:
    """A section dataclass with every path in it and its subsections expanded.

    prefix: of its keys, "model." for example. Raises ConfigError.
    """
    changes: dict[str, object] = {}
    section_type: type = type(section)
    for name, annotation in field_types(section_type).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            expanded: object = expand_paths(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            expanded = tuple(
                expand_paths(item, f"{prefix}{name}.{number}.") for number, item in enumerate(value)
            )
        elif _is_path(annotation):
            expanded = _expand_value(prefix + name, value)
        else:
            continue
        if expanded != value:
            changes[name] = expanded
    return dataclasses.replace(section, **changes) if changes else section  # type: ignore[type-var]


def _expand_value(key: str, value: object) -> object:
    try:
        if isinstance(value, str):
            return expand_path(value)
        if isinstance(value, tuple):
            return tuple(expand_path(path) for path in value)
    except PathError as error:
        raise ConfigError(key, value, error.problem, error.fix) from None
    return value


def _is_path(annotation: object) -> bool:
    """Whether the marker is anywhere in an annotation."""
    return isinstance(annotation, IsPath) or any(
        _is_path(inner)
        for inner in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ()))
    )
