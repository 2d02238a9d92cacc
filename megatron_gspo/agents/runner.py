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
from typing import Any, Protocol

from megatron_gspo.agents.run_clock import RunClock, ends_in_time
from megatron_gspo.errors import InputError
from megatron_gspo.launch_environment import own_import_path

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

    async def start(self, task: Mapping[str, Any], directory: Path, output: Path) -> StartedProgram:
        """See `Program.start`."""
        task_file = directory.with_name(f"{directory.name}.task.json")
        if self._uses("task_file"):
            task_file.touch(mode=0o600)
            task_file.write_text(json.dumps(task))
        values = {**task, "task_file": str(task_file)}
        texts = _values(values)
        given = {
            "command": [_filled(argument, texts) for argument in self.command],
            "directory": str(directory),
            "env": run_environment(filled(self.env, values), directory),
        }
        keeper, process_id = await _start_keeper(output)
        started = _KeptProgram(keeper, process_id, task_file)
        try:
            await _send(keeper, given)
        except BaseException:
            started.kill()
            started.close()
            raise
        return started

    async def close(self) -> None:
        """See `Program.close`."""

    def _uses(self, name: str) -> bool:
        """Whether the command or the environment has this name in braces."""
        return any(f"{{{name}}}" in text for text in (*self.command, *self.env.values()))


@dataclass(frozen=True)
class AgentExit:
    """How a program ended. code: negative for a signal. timed_out: ended by the time limit. tail:
    the end of what it has printed."""

    code: int
    timed_out: bool
    tail: str


class StartedProgram(Protocol):
    """A program that runs, with a keeper that ends all processes which it starts."""

    @property
    def code(self) -> int | None:
        """The exit code; None before the end."""
        ...

    async def wait(self) -> int:
        """The exit code, when the program and all that it started have ended."""
        ...

    def process_id(self) -> int:
        """The process id of the program, which leads its process group. Raises OSError or
        ValueError if it is not known yet, or not any more."""
        ...

    def kill(self) -> None:
        """Let the keeper end all."""
        ...

    def close(self) -> None:
        """Release what is left of an ended program."""
        ...


class Program(Protocol):
    """What is started for each run."""

    @property
    def run_timeout(self) -> float:
        """Seconds."""
        ...

    @property
    def kill_after(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        ...

    async def start(self, task: Mapping[str, Any], directory: Path, output: Path) -> StartedProgram:
        """Start a run.

        task: JSON-able; its names may be in braces. directory: where it works. output: an empty
        file for what it prints.
        """
        ...

    async def close(self) -> None:
        """Start no more runs."""
        ...


async def run_program(
    program: Program, task: Mapping[str, Any], directory: Path, *, clock: RunClock
) -> AgentExit:
    """Run a program to its end; it and all processes that it started have ended then.

    task: see `Program.start`. directory: where it works; its output goes to a file beside it.
    clock: that `run_timeout` is measured with. Cancelling ends the program too.
    """
    output = directory.with_name(f"{directory.name}.log")
    output.touch()
    started = await program.start(task, directory, output)
    timed_out = False
    try:
        timed_out = not await ends_in_time(
            started.wait(), lambda: program.run_timeout - clock.seconds
        )
    finally:
        await _end(started, program.kill_after)
        started.close()
    code = started.code
    return AgentExit(1 if code is None else code, timed_out, tail(output))


async def _end(started: StartedProgram, kill_after: float) -> None:
    """SIGTERM to the program's group, then the end of all its processes."""
    if started.code is not None:
        return
    # No process id, or the time is over: TimeoutError is an OSError.
    with contextlib.suppress(OSError, ValueError):
        os.killpg(started.process_id(), signal.SIGTERM)
        await asyncio.wait_for(started.wait(), kill_after)
    if started.code is None:
        started.kill()
        await started.wait()


class _KeptProgram:
    """`StartedProgram` below an `agent_keeper`, which writes the process id to a pipe."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, process_id: int, task_file: Path
    ) -> None:
        """process_id: a descriptor to read it from."""
        self._keeper = keeper
        self._process_id = process_id
        self._task_file = task_file

    @property
    def code(self) -> int | None:
        return self._keeper.returncode

    async def wait(self) -> int:
        return await self._keeper.wait()

    def process_id(self) -> int:
        os.set_blocking(self._process_id, False)
        return int(os.read(self._process_id, 32))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._keeper.terminate()

    def close(self) -> None:
        os.close(self._process_id)
        self._task_file.unlink(missing_ok=True)


async def _start_keeper(output: Path) -> tuple[asyncio.subprocess.Process, int]:
    """A keeper that waits for its command, and the descriptor that it writes the process id to."""
    reader, writer = os.pipe()
    try:
        with output.open("wb") as log:
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
                env={**os.environ, **own_import_path()},
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return keeper, reader


async def _send(keeper: asyncio.subprocess.Process, given: Mapping[str, Any]) -> None:
    assert keeper.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has died; its exit code says so
        keeper.stdin.write(json.dumps(given).encode())
        await keeper.stdin.drain()
    keeper.stdin.close()


def run_environment(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of a program: PATH and the language, a home, and `env`."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "HOME": str(directory), "TMPDIR": str(directory), **env}


def filled(env: Mapping[str, str], task: Mapping[str, Any]) -> dict[str, str]:
    """An environment with the task's values in place of names in braces."""
    values = _values(task)
    return {name: _filled(value, values) for name, value in env.items()}


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


def tail(output: Path) -> str:
    """The end of what a program has printed."""
    with output.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _MAX_TAIL_BYTES, 0))
        return file.read().decode(errors="replace").strip()
