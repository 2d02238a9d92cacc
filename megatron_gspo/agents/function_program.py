"""Runs an agent's Python function: each run is a process that begins with its file imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_gspo
from megatron_gspo.agents.function_server import FunctionRun
from megatron_gspo.agents.runner import StartedProgram, filled, run_environment, tail


class FunctionProgram:
    """`Program` that is a function, "path/to/file.py:function" or "package.module:function".

    The first run starts a server that imports the file; see `function_server`. One that has died is
    started again by the next run.
    """

    def __init__(
        self,
        function: str,
        env: Mapping[str, str],
        *,
        run_timeout: float = 1800.0,
        kill_after: float = 5.0,
        python: str = sys.executable,
    ) -> None:
        """env, run_timeout, kill_after: as of `AgentProgram`; values of `env` without names in
        braces are set when the file is imported, too. python: the interpreter, which may be of
        another environment."""
        self.run_timeout = run_timeout
        self.kill_after = kill_after
        self._function = function
        self._env = env
        self._python = python
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-gspo-function-"))
        self._output = self._folder / "output.log"
        self._starting = asyncio.Lock()
        self._server: _Server | None = None

    async def start(self, task: Mapping[str, Any], directory: Path, output: Path) -> StartedProgram:
        """See `Program.start`."""
        env = run_environment(self._with_python_path(filled(self._env, task)), directory)
        run = FunctionRun(task, str(directory), str(output), env)
        server, is_new = await self._running_server()
        program = await server.started(run)
        if not program.has_begun and not is_new:
            # It has died since its last run.
            program.close()
            server, _ = await self._running_server(instead_of=server)
            program = await server.started(run)
        return program

    async def _running_server(self, instead_of: _Server | None = None) -> tuple[_Server, bool]:
        """The server, and whether this call has started it. instead_of: one that has died."""
        async with self._starting:
            server = self._server
            if server is not None and server is not instead_of and not server.has_ended:
                return server, False
            if server is not None:
                await server.close()
            self._server = await self._started_server()
            return self._server, True

    async def close(self) -> None:
        """See `Program.close`. May be called again."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _started_server(self) -> _Server:
        home = self._folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        constant = {name: value for name, value in self._env.items() if "{" not in value}
        control, servers_end = socket.socketpair()
        with servers_end, self._output.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                self._python,
                "-m",
                "megatron_gspo.agents.function_server",
                self._function,
                str(servers_end.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[servers_end.fileno()],
                start_new_session=True,  # not interrupted by Ctrl-C
                env=run_environment(self._with_python_path(constant), home),
            )
        server = _Server(process, control, self._output)
        try:
            await asyncio.wait_for(server.wait_until_ready(), self.run_timeout)
        except TimeoutError:
            server.kill()
            with self._output.open("a") as log:
                log.write(
                    f"\nimporting {self._function} took more than {self.run_timeout:g} s"
                    " (agents.run_timeout)"
                )
        except BaseException:
            await server.close()
            raise
        return server

    def _with_python_path(self, env: Mapping[str, str]) -> dict[str, str]:
        """An environment in which this package is found, and in this interpreter what is found
        here."""
        if self._python == sys.executable:
            folders = [*filter(None, sys.path), os.getcwd()]
        else:
            folders = [str(self._folder / "path")]
            link = self._folder / "path" / "megatron_gspo"
            if not link.is_symlink():  # its neighbours are of this interpreter
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(Path(megatron_gspo.__file__).parent)
        first = env.get("PYTHONPATH")
        return {**env, "PYTHONPATH": os.pathsep.join([*([first] if first else []), *folders])}


class _Server:
    """The process of `function_server`."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, output: Path
    ) -> None:
        control.setblocking(False)
        self._process = process
        self._control = control
        self._output = output

    @property
    def has_ended(self) -> bool:
        """Whether it can begin no more runs."""
        return self._process.returncode is not None

    async def wait_until_ready(self) -> None:
        """Until the file is imported, or the process has ended."""
        await asyncio.get_running_loop().sock_recv(self._control, 1)

    async def started(self, run: FunctionRun) -> _ForkedProgram:
        """A run that has begun, or that has ended because the server is dead."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # it has died: the run ends so
            await self._send(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        program = _ForkedProgram(reader, writer, Path(run.output), self._output)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(run.to_line())
                await writer.drain()
            await program.until_begun()
        except BaseException:
            program.kill()
            program.close()
            raise
        return program

    async def _send(self, connection: socket.socket) -> None:
        while True:
            try:
                socket.send_fds(self._control, [b"r"], [connection.fileno()])
                return
            except BlockingIOError:  # it has yet to begin hundreds of runs
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        """End it; the keepers end its runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End it, and wait for that."""
        self._control.close()
        self.kill()
        await self._process.wait()


class _ForkedProgram:
    """`StartedProgram` that `function_server` has forked."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: Path,
        server_output: Path,
    ) -> None:
        """reader, writer: of the run's connection. output: of the run; gets the end of the
        server's if that has died."""
        self._reader = reader
        self._writer = writer
        self._output = output
        self._server_output = server_output
        self._process_id: int | None = None
        self._code: int | None = None
        self._is_begun_or_over = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    @property
    def code(self) -> int | None:
        return self._code

    @property
    def has_begun(self) -> bool:
        """Whether its process is known."""
        return self._process_id is not None

    async def until_begun(self) -> None:
        """Until its process is known, or it is over without one."""
        await self._is_begun_or_over.wait()

    async def wait(self) -> int:
        return await asyncio.shield(self._reading)

    def process_id(self) -> int:
        if self._process_id is None:
            raise ValueError("the process has not begun")
        return self._process_id

    def kill(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> int:
        code = None
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                name, _, value = line.partition(b" ")
                if name == b"process":
                    self._process_id = int(value)
                    self._is_begun_or_over.set()
                else:
                    code = int(value)
        if code is None:
            code = 1
            self._output.write_text(tail(self._server_output))
        self._code = code
        self._is_begun_or_over.set()
        return code
