"""Options in the arguments of started servers."""

from __future__ import annotations

from collections.abc import Sequence


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option, given as `--name value` or `--name=value`; None if it is not
    given.
    """
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.split("=", 1)[1]
    return found
