"""What runs in a sandbox and what comes back. Imported by the launcher: standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

BOX = "/box"  # the directory of the program, where it has a file system of its own
Ending = Literal["exit", "cpu_time", "wall_time", "output", "compile_error"]


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: no verdict, a counted failure."""


class Limits(NamedTuple):
    """Limits of one run. All are set before the program starts.

    cpu_seconds: of the program and its children. wall_seconds: until everything is killed.
    memory_bytes: address space of each process. processes: with threads. output_bytes: of stdout.
    disk_bytes: of all files together and of each file; where programs are not confined, of each
    file alone.
    """

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    processes: int
    output_bytes: int
    disk_bytes: int = 64 * 2**20


class Command(NamedTuple):
    """A program: argv and its files (name -> content), which are readable and executable, in its
    directory.

    environment: all variables; none are inherited.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    limits: Limits
    stdin: bytes = b""
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """How a run ended. code: exit status, 128 + signal if a signal ended it; 137 if it was killed
    at a limit.

    stdout: at most `Limits.output_bytes`. stderr: its first 4 KiB. cpu_seconds: of all processes.
    """

    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes = b""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


class Mechanism(NamedTuple):
    """How the launcher confines programs.

    privileged: bubblewrap: whether root sets the sandbox up; False: an unprivileged user does (root
    becomes one first). limits: whether programs run as root; False: as an unprivileged user.
    """

    name: Literal["bubblewrap", "limits"]
    privileged: bool


class Setup(NamedTuple):
    """The first message to a launcher.

    readable: paths of the host that programs may read, with all below. bubblewrap: its executable,
    or None. system_call_filter: a BPF program, or None.
    """

    mechanism: Mechanism
    readable: tuple[str, ...]
    bubblewrap: str | None = None
    system_call_filter: bytes | None = None
