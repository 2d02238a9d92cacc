"""The command line as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Of the command line. config: file; "" for the machine alone. seconds: that the ranks may take to meet, and to
    exchange something on all groups; local_seconds: for what each does alone, of which reading prompts takes longest;
    grace: beyond a limit, for reports. world_size: to check the config for; None: as many as there are."""

    config: str = ""
    overrides: tuple[str, ...] = ()
    as_json: bool = False
    probe: bool = False
    allow_warnings: bool = False
    seconds: float = 60.0
    local_seconds: float = 600.0
    grace: float = 10.0
    world_size: int | None = None
