"""Paths as people write them: `~`, `$NAME` and `${NAME}` stand for what a shell would make of them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import typing
from pathlib import Path
from typing import Annotated, TypeVar

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.fields import field_types

Section = TypeVar("Section")
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)(?P<end>\}?)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")


class IsPath:
    """Marks a config key that holds a path, or a path followed by `:function` or `:split`."""


UserPath = Annotated[str, IsPath()]


class PathError(ValueError):
    """A path with a variable or user that does not exist. problem and fix: as in `ConfigError`."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem = problem
        self.fix = fix


def expand_path(text: str) -> str:
    """The path with its variables and a leading `~` or `~user` replaced. Raises PathError.

    A `$` that no name follows stays.
    """
    expanded = _VARIABLE.sub(_value, text)
    if not expanded.startswith("~"):
        return expanded
    path = os.path.expanduser(expanded)
    if path.startswith("~"):
        user = expanded.partition("/")[0]
        raise PathError(f"{user} is not the home directory of any user", "write the whole path")
    return path


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
        elif _is_path(annotation):
            expanded = _expand_value(prefix + name, value)
        else:
            continue
        if expanded != value:
            changes[name] = expanded
    return dataclasses.replace(section, **changes) if changes else section  # type: ignore[type-var]


def path_argument(text: str) -> Path:
    """The `type` of a path among the arguments of a command line."""
    return Path(path_text_argument(text))


def path_text_argument(text: str) -> str:
    """As `path_argument`, for an argument that may also be something else, a URL for example."""
    try:
        return expand_path(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _value(variable: re.Match[str]) -> str:
    name = variable["bare"] or variable["braced"]
    written = variable[0]
    if not variable["bare"] and not (variable["end"] and name.isidentifier() and name.isascii()):
        raise PathError(f"{written} is not a variable", "write ${NAME} with the name of an environment variable")
    if name not in os.environ:
        raise PathError(f"the environment has no variable {name}", "set it, or write the whole path")
    if not os.environ[name]:
        raise PathError(f"the environment variable {name} is empty", "set it, or write the whole path")
    return os.environ[name]


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
        _is_path(inner) for inner in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ()))
    )
