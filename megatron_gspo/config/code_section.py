"""Section `data.code`: the verifier `code`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.paths import UserPath

COMPILE_SECONDS = 60.0  # of wall-clock time
_WALL_FACTOR = 3.0
_WALL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """How the verifier `code` runs programs and scores them."""

    language: Literal["python", "cpp"] = "python"
    """Language of the responses; `cpp` needs g++."""
    score: Literal["all", "fraction"] = "all"
    """1 if all tests pass, else 0; or the share that pass."""
    time_limit: Annotated[float, Gt(0)] = 6.0
    """CPU seconds per test; the wall-clock limit is 3 times this + 1."""
    memory_mib: Annotated[int, Ge(64)] = 1024
    """Address space of each process, MiB."""
    processes: Annotated[int, Ge(1), Le(1000)] = 8
    """Processes and threads of a program."""
    output_mib: Annotated[int, Ge(1), Le(64)] = 16
    """Standard output per test, MiB."""
    float_tolerance: Annotated[float, Ge(0)] = 1e-6
    """Absolute or relative tolerance of decimal numbers."""
    python: UserPath | None = None
    """Interpreter of the programs; null is the trainer's."""
    require_isolation: bool = True
    """Refuse to start without bubblewrap or `sandbox_url`; false lets programs do what this user
    can."""
    sandbox_url: str | None = None
    """Sandbox Fusion server, as http://host:port."""

    @property
    def wall_limit(self) -> float:
        """Wall-clock seconds per test."""
        return _WALL_FACTOR * self.time_limit + _WALL_SECONDS
