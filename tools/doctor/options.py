"""The command line as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of the command line. config: file; "" without one. seconds: that the ranks may
    take to meet, and for an exchange. world_size: to check the config for; None: as many processes
    as there are.
    """

    config: str = ""
    overrides: tuple[str, ...] = ()
    allow_warnings: bool = False
    seconds: float = 60.0
    world_size: int | None = None
