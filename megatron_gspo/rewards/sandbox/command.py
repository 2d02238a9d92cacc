"""What runs in a sandbox and what comes back. Imported by the launcher: standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

BOX = "/box"  # the directory of the program, where it has a file system of its own
Ending = Literal["exit", "cpu_time", "wall_time", "output", "compile_error"]


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: no verdict, a counted failure."""


class Limits(NamedTuple):
    """Limits of one run. All are set before the program starts."""

    cpu_seconds: float
    """CPU time of the program and its children."""

    wall_seconds: float
    """Time until everything is killed."""

    memory_bytes: int
    """Address space of each process."""

    processes: int
    """Number of processes, with threads."""

    output_bytes: int
    """Most bytes of stdout."""

    disk_bytes: int = 64 * 2**20
    """Most bytes of all files together and of each file; where programs are not confined, of each
    file alone."""


class Command(NamedTuple):
    """A program: argv and its files (name -> content), which are readable and executable, in its
    directory.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    limits: Limits
    stdin: bytes = b""
    environment: Mapping[str, str] = {}
    """All variables; none are inherited."""


class Outcome(NamedTuple):
    """How a run ended."""

    ending: Ending
    code: int
    """Exit status, 128 + signal if a signal ended it; 137 if it was killed at a limit."""

    stdout: bytes
    """At most `Limits.output_bytes` bytes."""

    stderr: bytes = b""
    """Its first 4 KiB."""

    cpu_seconds: float = 0.0
    """CPU time of all processes."""

    wall_seconds: float = 0.0


class Mechanism(NamedTuple):
    """How the launcher confines programs."""

    name: Literal["bubblewrap", "limits"]
    privileged: bool
    """With bubblewrap, whether root sets the sandbox up; else an unprivileged user does, which root
    becomes first. With limits, whether programs run as root; else as an unprivileged user.
    """


class Setup(NamedTuple):
    """The first message to a launcher."""

    mechanism: Mechanism
    readable: tuple[str, ...]
    """Paths of the host that programs may read, with all below."""

    bubblewrap: str | None = None
    """Path of the executable, or None."""

    system_call_filter: bytes | None = None
    """A BPF program, or None."""
