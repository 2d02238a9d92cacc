"""What runs the program of a response: this machine's sandbox or a Sandbox Fusion server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from megatron_gspo.config.code_section import COMPILE_SECONDS, CodeConfig
from megatron_gspo.rewards.sandbox.command import Command, Limits, Outcome, SandboxError, Setup
from megatron_gspo.rewards.sandbox.isolation import (
    GUARANTEES,
    Interpreter,
    find_interpreter,
    find_setup,
)
from megatron_gspo.rewards.sandbox.languages import CPP_COMPILER, CPP_OPTIONS
from megatron_gspo.rewards.sandbox.launcher_client import Launcher

Program = Callable[[str], Outcome]
"""Runs the program on a standard input. Raises SandboxError if the sandbox failed."""

# The interpreter runs without `site`, because of its paths, and `site` has these functions. They are
# added where a program has their names: that takes a quarter of the interpreter's start.
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
    """Programs in bubblewrap on this machine."""

    def __init__(self, config: CodeConfig, interpreter: Interpreter, setup: Setup) -> None:
        """See `open_local_sandbox`."""
        self._privileged = setup.privileged
        self._python = interpreter.executable
        self._language = config.language
        self._limits = Limits(
            cpu_seconds=config.time_limit,
            wall_seconds=config.wall_limit,
            memory_bytes=config.memory_mib * 2**20,
            processes=config.processes,
            output_bytes=config.output_mib * 2**20,
        )
        self._launcher = Launcher(setup)

    def prepare(self, source: str) -> Program:
        """See `Sandbox`."""
        content = source.encode(errors="replace")
        if self._language == "cpp":
            return self._runner(("./main",), {"main": self._compile(content)})
        names = any(name in content for name in _NAMES_OF_SITE)
        arguments = ("-c", _WITH_NAMES_OF_SITE) if names else ("main.py",)
        return self._runner((self._python, "-I", "-S", *arguments), {"main.py": content})

    def describe(self) -> str:
        """See `Sandbox`."""
        user = "" if self._privileged else " (user namespace)"
        isolated = ", ".join(name.replace("_", " ") for name in GUARANTEES)
        return f"bubblewrap{user} isolates {isolated}"

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
    """Raises SandboxError in one line if programs can't run here, or not isolated."""
    interpreter = find_interpreter(config.python)
    setup = find_setup(interpreter)
    if config.language == "cpp" and not os.access(CPP_COMPILER, os.X_OK):
        raise SandboxError(f"data.code.language = cpp needs {CPP_COMPILER}; install g++")
    return LocalSandbox(config, interpreter, setup)
