"""Finds how bubblewrap isolates programs on this machine, by running a program that tries to look out of it."""

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

from megatron_gspo.rewards.sandbox.command import Command, Limits, SandboxError, Setup
from megatron_gspo.rewards.sandbox.launcher_client import Launcher
from megatron_gspo.rewards.sandbox.system_call_filter import system_call_filter

GUARANTEES = ("file_system", "network", "processes", "system_calls")
_OR_A_SERVER = "or give a Sandbox Fusion server as data.code.sandbox_url"
# What interpreters, compilers and shells need. Not all of /usr: images keep applications in /usr/src and /usr/local.
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
    wanted = {Path(prefix).resolve() / name for prefix in prefixes for name in _LIBRARIES} | {
        Path(real)
    }
    system = [path for path in _SYSTEM if os.path.lexists(path)]
    others = [
        path
        for path in sorted(wanted)
        if path.exists() and not any(map(path.is_relative_to, system))
    ]
    return Interpreter(real, (*system, *map(str, others)))


def find_setup(interpreter: Interpreter, privileged: tuple[bool, ...] = (True, False)) -> Setup:
    """The first set-up in which all of `GUARANTEES` hold. Takes about 0.1 s.

    privileged: what is tried; see `Setup`. Only root can try True.
    Raises SandboxError in one line where programs cannot be isolated.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            f"bubblewrap is not installed; install it (apt-get install bubblewrap), {_OR_A_SERVER}"
        )
    filtered = system_call_filter()
    if filtered is None:
        raise SandboxError(
            "pyseccomp or libseccomp is missing; install both (pip install 'megatron-gspo[code]'), "
            f"{_OR_A_SERVER}"
        )
    failures: list[str] = []
    for value in privileged:
        if value and os.geteuid() != 0:
            continue
        setup = Setup(program, value, interpreter.readable, filtered)
        try:
            missing = set(GUARANTEES) - set(probe(setup, interpreter))
        except SandboxError as error:
            failures.append(str(error))
            continue
        if not missing:
            return setup
        failures.append(f"no isolation of {', '.join(sorted(missing))}")
    raise SandboxError(
        f"programs cannot be isolated here ({'; '.join(failures)}); allow namespaces "
        f"(docs/code_rewards.md), {_OR_A_SERVER}"
    )


def probe(setup: Setup, interpreter: Interpreter) -> tuple[str, ...]:
    """The guarantees that hold, tried from inside. Raises SandboxError if the probe does not run."""
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
