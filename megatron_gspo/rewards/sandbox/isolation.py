"""Finds the strongest isolation that works on this machine, by running a program that tries to
look out of it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.rewards.sandbox.command import Command, Limits, Mechanism, SandboxError, Setup
from megatron_gspo.rewards.sandbox.launcher_client import Launcher
from megatron_gspo.rewards.sandbox.system_call_filter import system_call_filter

GUARANTEES = ("file_system", "network", "processes", "system_calls")
MECHANISMS = (
    Mechanism("bubblewrap", privileged=True),
    Mechanism("bubblewrap", privileged=False),
    Mechanism("limits", privileged=False),
    Mechanism("limits", privileged=True),
)
# What interpreters, compilers and shells need. Not all of /usr: images keep applications in
# /usr/src and /usr/local.
_SYSTEM = (
    "/usr/bin",
    "/usr/include",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec/gcc",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
_LIBRARIES = ("lib", "lib32", "lib64")  # of an interpreter, below its prefixes
_LIMITS = Limits(
    cpu_seconds=10.0, wall_seconds=20.0, memory_bytes=2**30, processes=8, output_bytes=2**16
)
_PROBE = """
import json, os, socket, sys
marker, port, pid = json.load(sys.stdin)

def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError as error:
        return type(error).__name__

def connect():
    with socket.socket(socket.AF_INET) as client:
        client.settimeout(5)
        client.connect(("127.0.0.1", port))

print(json.dumps({
    "file_system": refused(os.stat, marker) == "FileNotFoundError",
    "network": refused(connect) is not None,
    "processes": refused(os.kill, pid, 0) == "ProcessLookupError",
    "system_calls": refused(os.memfd_create, "x") == "PermissionError",
}))
"""


@dataclass(frozen=True)
class Isolation:
    """What a measurement says about the isolation of programs here."""

    setup: Setup
    """The first message to launchers."""

    guarantees: tuple[str, ...]
    """The `GUARANTEES` that hold."""

    failures: tuple[str, ...] = ()
    """Mechanisms that do not work here, with the reason."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Guarantees that do not hold."""
        return tuple(name for name in GUARANTEES if name not in self.guarantees)

    def describe(self) -> str:
        """One line: the mechanism and what it isolates."""
        mechanism = self.setup.mechanism
        user = "" if mechanism.privileged or mechanism.name != "bubblewrap" else " (user namespace)"
        isolated = ", ".join(name.replace("_", " ") for name in self.guarantees) or "nothing"
        return f"{mechanism.name}{user} isolates {isolated}"


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter outside any virtual environment, and the paths that it needs to read."""

    executable: str
    readable: tuple[str, ...]


def find_interpreter(executable: str | None = None) -> Interpreter:
    """executable: default this process's. Raises SandboxError if it cannot be run."""
    facts = "os.path.realpath(sys.executable), sys.base_prefix, sys.base_exec_prefix"
    code = f"import json, os, sys; print(json.dumps([{facts}]))"
    start = executable or getattr(sys, "_base_executable", None) or sys.executable
    try:
        printed = subprocess.run(
            [start, "-I", "-S", "-c", code], capture_output=True, check=True, timeout=60
        ).stdout
        real, *prefixes = json.loads(printed)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"{start} does not run as a Python interpreter ({error}); set data.code.python"
        ) from error
    wanted = {Path(prefix).resolve() / name for prefix in prefixes for name in _LIBRARIES}
    wanted.add(Path(real))
    system = [path for path in _SYSTEM if os.path.lexists(path)]
    others = [
        path
        for path in sorted(wanted)
        if path.exists() and not any(map(path.is_relative_to, system))
    ]
    return Interpreter(real, (*system, *map(str, others)))


def find_isolation(
    interpreter: Interpreter, mechanisms: tuple[Mechanism, ...] = MECHANISMS
) -> Isolation:
    """The first mechanism with all guarantees, or else the one with the most. Takes about 0.1 s.

    Raises SandboxError if none works.
    """
    working: list[Isolation] = []
    failures: list[str] = []
    program = shutil.which("bwrap")
    filtered = system_call_filter()
    if program is None:
        failures.append("bubblewrap is not installed")
    for mechanism in mechanisms:
        if mechanism.privileged and os.geteuid() != 0:
            continue
        if mechanism.name == "bubblewrap" and program is None:
            continue
        setup = Setup(mechanism, interpreter.readable, program, filtered)
        try:
            working.append(Isolation(setup, probe(setup, interpreter)))
        except SandboxError as error:
            failures.append(f"{mechanism.name}: {error}")
            continue
        if not working[-1].missing:
            break
    if not working:
        raise SandboxError(f"no program can be run here ({'; '.join(failures) or 'no mechanism'})")
    best = max(working, key=lambda isolation: len(isolation.guarantees))
    return Isolation(best.setup, best.guarantees, tuple(failures))


def probe(setup: Setup, interpreter: Interpreter) -> tuple[str, ...]:
    """The guarantees that hold, tried from inside.

    Raises SandboxError if the probe does not run.
    """
    with tempfile.NamedTemporaryFile() as marker, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(marker.name, 0o644)
        facts = json.dumps([marker.name, server.getsockname()[1], os.getpid()]).encode()
        argv = (interpreter.executable, "-I", "-S", "probe.py")
        launcher = Launcher(setup)
        try:
            outcome = launcher.run(Command(argv, {"probe.py": _PROBE.encode()}, _LIMITS, facts))
        finally:
            launcher.close()
    try:
        answers = json.loads(outcome.stdout)
    except ValueError as error:
        reason = outcome.stderr.decode(errors="replace").strip() or f"exit code {outcome.code}"
        raise SandboxError(f"the probe failed ({reason})") from error
    return tuple(name for name in GUARANTEES if answers[name])
