"""Runs an agent's program once: a clean environment, a directory and a process group of its own, a
time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_gspo.errors import InputError

_MAX_TAIL_BYTES = 2000  # of the output in a message
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True)
class AgentProgram:
    """An agent's command, started once for each run.

    env: beside PATH and the language. Values and arguments may contain {base_url}, {anthropic_url},
    {key}, {prompt} and other names of the run's `values`; but no argument may contain {key}, since
    every user of the machine can read it there. run_timeout: seconds. kill_after: seconds from
    SIGTERM to SIGKILL.

    Raises InputError for a command that is empty or has the key.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    run_timeout: float = 1800.0
    kill_after: float = 5.0

    def __post_init__(self) -> None:
        if not self.command:
            raise InputError("agents.command is empty; give the program and its arguments")
        if any("{key}" in argument for argument in self.command):
            raise InputError(
                "agents.command has {key}, which every user of the machine could read; pass it in"
                " agents.env"
            )


@dataclass(frozen=True)
class AgentExit:
    """How a program ended. code: negative for a signal. timed_out: ended by the time limit. tail:
    the end of what it has printed."""

    code: int
    timed_out: bool
    tail: str


async def run_program(
    program: AgentProgram, values: Mapping[str, str], directory: Path
) -> AgentExit:
    """Run a program to its end; it and all processes that it started have ended then.

    values: for the names in braces. directory: where it works; its output goes to a file beside it.
    Cancelling ends the program too.
    """
    output = directory.with_name(f"{directory.name}.log")
    reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        log = stack.enter_context(output.open("wb"))
        try:
            keeper = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megatron_gspo.agents.agent_keeper",
                str(os.getpid()),
                str(writer),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,  # not interrupted by Ctrl-C
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            os.close(writer)
        timed_out = False
        try:
            await _send(keeper, program, values, directory)
            await asyncio.wait_for(keeper.wait(), program.run_timeout)
        except TimeoutError:
            timed_out = True
        finally:
            await _end(keeper, reader, program.kill_after)
    code = keeper.returncode
    return AgentExit(1 if code is None else code, timed_out, _tail(output))


async def _send(
    keeper: asyncio.subprocess.Process,
    program: AgentProgram,
    values: Mapping[str, str],
    directory: Path,
) -> None:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    home = {"HOME": str(directory), "TMPDIR": str(directory)}
    given = {
        "command": [_filled(argument, values) for argument in program.command],
        "directory": str(directory),
        "env": {
            **passed_on,
            **home,
            **{name: _filled(value, values) for name, value in program.env.items()},
        },
    }
    assert keeper.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has died; its exit code says so
        keeper.stdin.write(json.dumps(given).encode())
        await keeper.stdin.drain()
    keeper.stdin.close()


async def _end(keeper: asyncio.subprocess.Process, reader: int, kill_after: float) -> None:
    """SIGTERM to the program's group, then the end of all its processes."""
    if keeper.returncode is not None:
        return
    os.set_blocking(reader, False)
    # No process id yet, none any more, or the time is over: TimeoutError is an OSError.
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int(os.read(reader, 32)), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(keeper.wait()), kill_after)
    if keeper.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            keeper.terminate()
        await keeper.wait()


def _filled(text: str, values: Mapping[str, str]) -> str:
    """A text with values in place of the names in braces; other braces stay."""
    pieces = []
    rest = text
    while rest:
        before, brace, after = rest.partition("{")
        pieces.append(before)
        name, end, behind = after.partition("}")
        if brace and end and name in values:
            pieces.append(values[name])
            rest = behind
        else:
            pieces.append(brace)
            rest = after
    return "".join(pieces)


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _MAX_TAIL_BYTES, 0))
        return file.read().decode(errors="replace").strip()
