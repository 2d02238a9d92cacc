"""Paths as people write them: `~`, `$NAME` and `${NAME}` stand for what a shell would make of
them.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)(?P<end>\}?)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")


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


def path_argument(text: str) -> Path:
    """The `type` of a path among the arguments of a command line."""
    return Path(path_text_argument(text))


def path_text_argument(text: str) -> str:
    """Like `path_argument`, for an argument that may also be something else, a URL for example."""
    try:
        return expand_path(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _value(variable: re.Match[str]) -> str:
    name = variable["bare"] or variable["braced"]
    written = variable[0]
    if not variable["bare"] and not (variable["end"] and name.isidentifier() and name.isascii()):
        raise PathError(
            f"{written} is not a variable", "write ${NAME} with the name of an environment variable"
        )
    if name not in os.environ:
        raise PathError(
            f"the environment has no variable {name}", "set it, or write the whole path"
        )
    if not os.environ[name]:
        raise PathError(
            f"the environment variable {name} is empty", "set it, or write the whole path"
        )
    return os.environ[name]
