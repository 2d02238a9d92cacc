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
from typing import Any

from megatron_gspo.agents.run_clock import RunClock, ends_in_time
from megatron_gspo.errors import InputError

_MAX_TAIL_BYTES = 2000  # of the output in a message
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")


# What the clients of OpenAI and Anthropic read.
CLIENT_ENV = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_KEY": "{key}",
    "ANTHROPIC_BASE_URL": "{anthropic_url}",
    "ANTHROPIC_API_KEY": "{key}",
}
COMMAND_ENV = CLIENT_ENV | {"TASK": "{prompt}"}


@dataclass(frozen=True)
class AgentProgram:
    """An agent's command, started once for each run.

    env: beside PATH and the language. Values and arguments may contain {base_url}, {anthropic_url},
    {key}, {prompt}, {metadata.NAME} and other names of the run's task, and {task_file}: the path of
    a JSON file with all of it. No argument may contain {key}, since every user of the machine can
    read it there. run_timeout: seconds. kill_after: seconds from SIGTERM to SIGKILL.

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

    def uses(self, name: str) -> bool:
        """Whether the command or the environment has this name in braces."""
        return any(f"{{{name}}}" in text for text in (*self.command, *self.env.values()))


def function_program(function: str, env: Mapping[str, str], *, run_timeout: float) -> AgentProgram:
    """The program that runs a Python function, "path/to/file.py:function" or
    "package.module:function", as an agent; see `agent_function`."""
    command = (sys.executable, "-m", "megatron_gspo.agents.agent_function", function, "{task_file}")
    path = os.pathsep.join([*filter(None, sys.path), os.getcwd()])
    return AgentProgram(command, {"PYTHONPATH": path, **env}, run_timeout)


@dataclass(frozen=True)
class AgentExit:
    """How a program ended. code: negative for a signal. timed_out: ended by the time limit. tail:
    the end of what it has printed."""

    code: int
    timed_out: bool
    tail: str


async def run_program(
    program: AgentProgram, task: Mapping[str, Any], directory: Path, *, clock: RunClock
) -> AgentExit:
    """Run a program to its end; it and all processes that it started have ended then.

    task: JSON-able, by the names in braces. directory: where it works; its output goes to a file
    beside it. clock: that `run_timeout` is measured with. Cancelling ends the program too.
    """
    output = directory.with_name(f"{directory.name}.log")
    task_file = directory.with_name(f"{directory.name}.task.json")
    values = _values(task) | {"task_file": str(task_file)}
    if program.uses("task_file"):
        task_file.touch(mode=0o600)
        task_file.write_text(json.dumps(task))
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
        try:
            await _send(keeper, program, values, directory)
            timed_out = not await ends_in_time(
                keeper.wait(), lambda: program.run_timeout - clock.seconds
            )
        finally:
            await _end(keeper, reader, program.kill_after)
            task_file.unlink(missing_ok=True)
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


def _values(task: Mapping[str, Any]) -> dict[str, str]:
    """The texts that stand for the names in braces: `metadata.NAME` for what is in the metadata."""
    values = {name: value for name, value in task.items() if name != "metadata"}
    for name, value in task.get("metadata", {}).items():
        values[f"metadata.{name}"] = value
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }


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
