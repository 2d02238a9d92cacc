"""What runs the program of a response: this machine's sandbox or a Sandbox Fusion server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from megatron_gspo.config.code_section import COMPILE_SECONDS, CodeConfig
from megatron_gspo.rewards.sandbox.command import Command, Limits, Outcome, SandboxError
from megatron_gspo.rewards.sandbox.isolation import (
    Interpreter,
    Isolation,
    find_interpreter,
    find_isolation,
)
from megatron_gspo.rewards.sandbox.languages import CPP_COMPILER, CPP_OPTIONS
from megatron_gspo.rewards.sandbox.launcher_client import Launcher

Program = Callable[[str], Outcome]
"""Runs the program on a standard input. Raises SandboxError if the sandbox failed."""

# The interpreter runs without `site`, because of its paths, and `site` has these functions. They
# are added where a program has their names: that takes a quarter of the interpreter's start.
_NAMES_OF_SITE = (b"exit", b"quit", b"help", b"copyright", b"credits", b"license")
_WITH_NAMES_OF_SITE = """\
import site, sys
site.setquit()
site.sethelper()
site.setcopyright()
sys.argv[0] = __file__ = "main.py"
del site, sys
exec(compile(open(__file__, "rb").read(), __file__, "exec", dont_inherit=True))
"""

COMPILATION = Limits(
    cpu_seconds=30.0,
    wall_seconds=COMPILE_SECONDS,
    memory_bytes=2**31,
    processes=32,
    output_bytes=64 * 2**20,
)


class CompileError(Exception):
    """The program does not compile."""


class Sandbox(Protocol):
    """Runs programs."""

    def prepare(self, source: str) -> Program:
        """Compile the program if its language is compiled. Raises CompileError, or SandboxError."""
        ...

    def describe(self) -> str:
        """A line for users: where programs run and what isolates them."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class LocalSandbox:
    """Programs in the isolation of this machine."""

    def __init__(self, config: CodeConfig, interpreter: Interpreter, isolation: Isolation) -> None:
        """See `open_local_sandbox`."""
        self.isolation = isolation
        self._python = interpreter.executable
        self._language = config.language
        self._limits = Limits(
            cpu_seconds=config.time_limit,
            wall_seconds=config.wall_limit,
            memory_bytes=config.memory_mib * 2**20,
            processes=config.processes,
            output_bytes=config.output_mib * 2**20,
        )
        self._launcher = Launcher(isolation.setup)

    def prepare(self, source: str) -> Program:
        """See `Sandbox`."""
        content = source.encode(errors="replace")
        if self._language == "cpp":
            return self._runner(("./main",), {"main": self._compile(content)})
        uses_site = any(name in content for name in _NAMES_OF_SITE)
        arguments = ("-c", _WITH_NAMES_OF_SITE) if uses_site else ("main.py",)
        return self._runner((self._python, "-I", "-S", *arguments), {"main.py": content})

    def describe(self) -> str:
        """See `Sandbox`."""
        described = self.isolation.describe()
        if self.isolation.missing:
            described += "; programs of the model can do what this user can do"
        return described

    def close(self) -> None:
        """See `Sandbox`."""
        self._launcher.close()

    def _runner(self, argv: tuple[str, ...], files: dict[str, bytes]) -> Program:
        return lambda stdin: self._launcher.run(
            Command(argv, files, self._limits, stdin.encode(errors="replace"))
        )

    def _compile(self, content: bytes) -> bytes:
        """The executable, which leaves the sandbox as standard output."""
        line = f"{CPP_COMPILER} {CPP_OPTIONS} -o main main.cpp 1>&2 && cat main"
        environment = {"PATH": "/usr/bin:/bin", "TMPDIR": "."}
        argv = ("/bin/sh", "-c", line)
        outcome = self._launcher.run(
            Command(argv, {"main.cpp": content}, COMPILATION, b"", environment)
        )
        if outcome.ending != "exit" or outcome.code != 0:
            raise CompileError(outcome.stderr.decode(errors="replace"))
        return outcome.stdout


def open_local_sandbox(config: CodeConfig) -> LocalSandbox:
    """In the strongest isolation that works here. Raises SandboxError in one line if programs can't
    run, or not as isolated as required."""
    interpreter = find_interpreter(config.python)
    isolation = find_isolation(interpreter)
    if config.require_isolation and isolation.missing:
        raise SandboxError(describe_lack(isolation))
    if config.language == "cpp" and not os.access(CPP_COMPILER, os.X_OK):
        raise SandboxError(f"data.code.language = cpp needs {CPP_COMPILER}; install g++")
    return LocalSandbox(config, interpreter, isolation)


def describe_lack(isolation: Isolation) -> str:
    """One line: what is not isolated, and how to isolate it."""
    missing = ", ".join(name.replace("_", " ") for name in isolation.missing)
    if isolation.missing == ("system_calls",):
        fix = "install pyseccomp and libseccomp (pip install 'megatron-gspo[code]')"
    else:
        fix = (
            "install bubblewrap (apt-get install bubblewrap) and allow namespaces"
            " (docs/code_rewards.md), give a Sandbox Fusion server as data.code.sandbox_url"
        )
    failures = [failure for failure in isolation.failures if not failure.startswith("limits")]
    reasons = f" ({', '.join(failures)})" if failures else ""
    return (
        f"data.code.require_isolation = true: no isolation of {missing}{reasons}; {fix}, or set it"
        " to false"
    )
