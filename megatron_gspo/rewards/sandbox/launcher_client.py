"""A launcher process and the connection to it."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import megatron_gspo
from megatron_gspo.rewards.sandbox.command import Command, Outcome, SandboxError, Setup

_MODULE = "megatron_gspo.rewards.sandbox.launcher"
_ROOT = Path(megatron_gspo.__file__).resolve().parent.parent
# Beyond the wall-clock limit of a program: its start and end on a busy machine.
_GRACE_SECONDS = 20.0
_END_SECONDS = 20.0  # for a launcher to end its sandboxes


class _Process(NamedTuple):
    process: subprocess.Popen[bytes]
    reader: Connection
    writer: Connection


class Launcher:
    """Runs commands in sandboxes, one at a time.

    A launcher that dies or hangs is replaced for the next command.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _stop, self._processes, os.getpid())

    def run(self, command: Command) -> Outcome:
        """Raises SandboxError if the sandbox or the launcher failed."""
        try:
            if not self._processes:
                self._processes.append(_start(self._setup))
            self._processes[0].writer.send(command)
            reader = self._processes[0].reader
            if not reader.poll(command.limits.wall_seconds + _GRACE_SECONDS):
                raise TimeoutError("no answer in time")
            answer: Outcome | str = reader.recv()
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxError(f"the launcher of the sandbox failed ({error})") from error
        if isinstance(answer, str):
            raise SandboxError(f"the sandbox could not be set up: {answer}")
        return answer

    @property
    def process_ids(self) -> list[int]:
        """Process id of the launcher, if it runs."""
        return [running.process.pid for running in self._processes]

    def close(self) -> None:
        """End the launcher and what it runs. The next command starts another."""
        _stop(self._processes, os.getpid())


def _start(setup: Setup) -> _Process:
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {_MODULE} import main;"
        " main(sys.argv[1:])"
    )
    theirs_in, writer = os.pipe()
    reader, theirs_out = os.pipe()
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                code,
                str(theirs_in),
                str(theirs_out),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs_in, theirs_out],
            env={},
        )
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    started = _Process(
        process, Connection(reader, writable=False), Connection(writer, readable=False)
    )
    started.writer.send(setup)
    return started


def _stop(processes: list[_Process], owner: int) -> None:
    """End the launcher, which ends its sandboxes."""
    if os.getpid() != owner:  # a fork
        return
    while processes:
        process, reader, writer = processes.pop()
        reader.close()
        writer.close()
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
