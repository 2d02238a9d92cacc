"""Runs an agent's function in processes that have imported it already.

`python -m megatron_gspo.agents.function_server FUNCTION DESCRIPTOR`: the function's file is
imported once, and each run is a fork of this process, with a keeper of its own (`worker_keeper`).
The descriptor is a socket: it gets a byte when runs can begin, and brings the connection of each
run. When it is closed this process ends, and its keepers end the runs.

A connection brings a `FunctionRun` as a line of JSON. It gets the line "process ID" and, when that
process and all that it has started have ended, "code EXIT_CODE". Closing it ends the run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_gspo.agents.agent_function import AgentTask, load_agent, play_task
from megatron_gspo.rewards.worker_keeper import fork_worker
from megatron_gspo.user_code import UserCodeError


@dataclass(frozen=True)
class FunctionRun:
    """A run of the function.

    task: the fields of an `AgentTask`. directory: where it works. output: the file that gets what
    it prints. env: its whole environment.
    """

    task: Mapping[str, Any]
    directory: str
    output: str
    env: Mapping[str, str]

    def to_line(self) -> bytes:
        """What the connection brings."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class _KeptRun:
    """keeper: a descriptor of the keeper's process, readable when it has ended."""

    connection: socket.socket
    keeper_pid: int
    keeper: int

    def close(self) -> None:
        self.connection.close()
        os.close(self.keeper)


def next_run(control: socket.socket) -> FunctionRun | None:
    """Returns in the process of each run; in the server None, when the socket is closed."""
    server = os.getpid()
    open_runs: set[_KeptRun] = set()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    control.send(b"r")
    while True:
        for key, _ in selector.select():
            run = key.data
            if run is None:
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    return None
                connection = socket.socket(fileno=descriptors[0])
                with connection.makefile("rb") as lines:
                    line = lines.readline()
                if not line:  # the run was cancelled
                    connection.close()
                    continue
                request = FunctionRun(**json.loads(line))
                keeper_pid = os.fork()
                if keeper_pid == 0:
                    selector.close()
                    control.close()
                    for other in open_runs:
                        other.close()
                    _begin(request, server, connection)
                    return request
                run = _KeptRun(connection, keeper_pid, os.pidfd_open(keeper_pid))
                open_runs.add(run)
                selector.register(run.connection, selectors.EVENT_READ, run)
                selector.register(run.keeper, selectors.EVENT_READ, run)
            elif run not in open_runs:
                continue  # another event of the same moment was its end
            elif key.fileobj is run.connection:
                # The trainer has closed it.
                selector.unregister(run.connection)
                signal.pidfd_send_signal(run.keeper, signal.SIGTERM)
            else:
                open_runs.remove(run)
                _report_end(run, selector)


def _report_end(run: _KeptRun, selector: selectors.BaseSelector) -> None:
    """Tell the trainer the exit code of a run whose keeper has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(run.keeper_pid, 0)[1])
    selector.unregister(run.keeper)
    with contextlib.suppress(KeyError):  # the trainer has closed the connection
        selector.unregister(run.connection)
    with contextlib.suppress(OSError):
        run.connection.send(f"code {code}\n".encode())
    run.close()


def _begin(request: FunctionRun, server: int, connection: socket.socket) -> None:
    """Returns in the run's process, which is as a new program's would be."""
    output = os.open(request.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    fork_worker(server, connection.fileno())
    connection.send(f"process {os.getpid()}\n".encode())
    connection.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.directory)


def main() -> None:
    """See the module."""
    name = sys.argv[1]
    control = socket.socket(fileno=int(sys.argv[2]))
    del sys.argv[1:]  # a package that reads the command line finds none of its own there
    failure = None
    try:
        function = load_agent(name)
    except UserCodeError as error:
        failure = str(error)
    # A collection of what was imported, at the latest when a run ends, would copy its memory.
    gc.collect()
    gc.freeze()
    request = next_run(control)
    if request is None:
        return
    if failure is not None:
        sys.exit(failure)
    is_played = False

    def leave() -> None:
        if is_played:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # What was registered first is called last. Freeing all modules takes longer than many runs.
    atexit.register(leave)
    play_task(function, AgentTask(**request.task))
    is_played = True


if __name__ == "__main__":
    main()
