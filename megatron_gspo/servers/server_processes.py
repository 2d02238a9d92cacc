"""Servers on this node: started together, monitored, restarted when they die, and ended with the
trainer.

Each server is a process group of its own under a supervisor (`supervisor.py`) that ends the group
with the trainer. A server has no state to save, so it is ended by SIGKILL: a regular shutdown takes
nine seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_gspo.errors import EngineError, UserError, writing
from megatron_gspo.servers.exit_reason import PORT_IN_USE, exit_reason
from megatron_gspo.servers.ports import LOOPBACK, choose_ports
from megatron_gspo.servers.server_launch import ServerLaunch, read_api_key
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

POLL_SECONDS = 0.25  # between two checks of a server
STABLE_SECONDS = 600.0  # a server that ran so long has its restarts counted from 0 again
_RESTART_SECONDS = 1.0  # before the first restart, doubling
_MAX_RESTART_SECONDS = 60.0
_HEALTH_SECONDS = 2.0  # timeout of /health
_KILL_SECONDS = 10.0  # a killed process group may take to end
_LOG_TAIL = 64 * 1024  # bytes of a log that are searched for the reason of an exit
_PORT_TRIES = 3  # of a start on free ports, which another process may take first


@dataclass
class Changes:
    """URLs of servers that, since the last poll, died, answer again (with the weights of the
    model's directory), or died too often to be restarted."""

    died: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.died or self.restarted or self.given_up)


@dataclass
class _ServerProcess:
    """One server."""

    index: int
    port: int
    url: str
    log: Path
    state: str = "starting"
    """One of "starting", "up", "down" (to be restarted) and "given up"."""

    supervisor: subprocess.Popen[bytes] | None = None
    log_start: int = 0  # bytes of the log from earlier starts
    state_since: float = 0.0
    restart_at: float = 0.0
    restarts: int = 0  # in a row
    key_file: str | None = None  # until the server has read it


class LocalServers:
    """The servers of a `ServerLaunch`. Also a context manager: `with LocalServers(launch) as
    servers`.

    max_restarts: of one server in a row. log: takes a line for each event: that they are up, why
    one ended.
    """

    def __init__(
        self,
        launch: ServerLaunch,
        *,
        max_restarts: int = 3,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self.launch = launch
        self.max_restarts = max_restarts
        self._log = log
        self._api_key = read_api_key(launch.config)
        self._processes: list[_ServerProcess] = []
        self._changes = Changes()
        self._lock = threading.Lock()  # of processes and changes
        self._stopping = threading.Event()
        self._monitor_thread: threading.Thread | None = None

    def __enter__(self) -> LocalServers:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """URLs of all servers, by index. They do not change after `start`."""
        return [process.url for process in self._processes]

    @property
    def logs(self) -> list[Path]:
        """Log files, by index."""
        return [process.log for process in self._processes]

    def start(self) -> list[str]:
        """Start all servers concurrently, wait until each answers, and monitor them from then on;
        returns their URLs.

        Raises InputError (interpreter, model, arguments, ports) or EngineError (a server ends or
        does not answer within `start_timeout`); all servers are stopped before.
        """
        launch = self.launch
        launch.check()
        with writing(launch.log_dir):
            Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
        ports = choose_ports(launch.config, launch.host)
        for index, port in enumerate(ports):
            log = Path(launch.log_dir) / f"server_{index}.log"
            self._processes.append(_ServerProcess(index, port, _url(launch.host, port), log))
        try:
            began = time.monotonic()
            for process in self._processes:
                self._start_process(process)
            self._wait_until_all_up()
        except BaseException:
            self.stop()
            raise
        seconds = time.monotonic() - began
        self._log(f"{', '.join(self.urls)} answer after {seconds:.0f} s")
        self._stopping.clear()
        self._monitor_thread = threading.Thread(
            target=self._monitor, name="local-servers", daemon=True
        )
        self._monitor_thread.start()
        return self.urls

    def poll(self) -> Changes:
        """What changed since the last call. Returns at once; a thread monitors the servers."""
        with self._lock:
            changes = self._changes
            self._changes = Changes()
        return changes

    def restart(self, url: str) -> None:
        """Kill a server that does not respond. It is restarted like one that died."""
        with self._lock:
            for process in self._processes:
                if process.url == url and process.state in ("up", "starting"):
                    self._kill(process)

    def stop(self) -> None:
        """Kill all servers and their child processes. May be called again."""
        self._stopping.set()
        if self._monitor_thread is not None:
            self._monitor_thread.join()
            self._monitor_thread = None
        with self._lock:
            for process in self._processes:
                self._kill(process)
            for process in self._processes:
                _wait_until_gone(process)
            self._processes = []

    # -- one server

    def _start_process(self, process: _ServerProcess) -> None:
        launch = self.launch
        process.key_file = launch.write_key(self._api_key) if self._api_key else None
        command = launch.command(process.index, process.port, key_file=process.key_file)
        # A server may log its settings, the key among them.
        hide = ["--hide"] if self._api_key else []
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
        with writing(process.log), open(process.log, "ab", opener=_open_private) as log:
            process.log_start = os.fstat(log.fileno()).st_size
            process.supervisor = subprocess.Popen(
                [*program, *hide, str(os.getpid()), *command],
                stdin=subprocess.PIPE if hide else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=launch.environment(process.index),
                start_new_session=True,
            )
        if process.supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.supervisor.stdin as stdin:
                stdin.write((self._api_key or "").encode())
        process.state = "starting"
        process.state_since = time.monotonic()

    def _kill(self, process: _ServerProcess) -> None:
        if process.key_file is not None:
            Path(process.key_file).unlink(missing_ok=True)
            process.key_file = None
        if process.supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.supervisor.pid, signal.SIGKILL)

    def _answers(self, process: _ServerProcess) -> bool:
        if not _is_healthy(process.url):
            return False
        if process.key_file is not None:  # read by now
            Path(process.key_file).unlink(missing_ok=True)
            process.key_file = None
        self.launch.after_start(process.url, self._api_key)
        return True

    def _exit_line(self, process: _ServerProcess, code: int | None) -> str:
        """One line about why the process ended, without the API key."""
        text = ""
        with contextlib.suppress(OSError), open(process.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(process.log_start, size - _LOG_TAIL))
            text = file.read().decode(errors="replace")
        if self._api_key:
            text = text.replace(self._api_key, "***")
        reason = exit_reason(
            text, code, self.launch.exit_causes, section=self.launch.config.section
        )
        return f"{self._name(process)}: {reason}; see {process.log}"

    def _name(self, process: _ServerProcess) -> str:
        return f"{self.launch.engine} server {process.index} ({process.url})"

    # -- start

    def _wait_until_all_up(self) -> None:
        tries = 1
        while waiting := [process for process in self._processes if process.state == "starting"]:
            for process in waiting:
                assert process.supervisor is not None
                code = process.supervisor.poll()
                late = time.monotonic() - process.state_since > self.launch.config.start_timeout
                if code is None and self._answers(process):
                    process.state = "up"
                    process.state_since = time.monotonic()
                elif code is not None or late:
                    reason = self._exit_line(process, code)
                    may_change_port = self.launch.config.port is None and tries < _PORT_TRIES
                    if PORT_IN_USE not in reason or not may_change_port:
                        raise EngineError(reason)
                    tries += 1
                    self._change_port(process)
            time.sleep(POLL_SECONDS)

    def _change_port(self, process: _ServerProcess) -> None:
        """Start it on another free port."""
        self._kill(process)
        _wait_until_gone(process)
        used_ports = [server.port for server in self._processes]
        [process.port] = choose_ports(
            self.launch.config, self.launch.host, count=1, avoid=used_ports
        )
        process.url = _url(self.launch.host, process.port)
        self._start_process(process)

    # -- monitor

    def _monitor(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            for process in self._processes:
                try:
                    self._check(process)
                except (OSError, UserError, psutil.Error) as error:  # no memory, a full disk
                    self._log(f"{self._name(process)}: {error}")
                    with self._lock:
                        self._schedule_restart(process)

    def _check(self, process: _ServerProcess) -> None:
        now = time.monotonic()
        if process.state == "down" and now >= process.restart_at:
            with self._lock:
                self._start_process(process)
        elif process.state in ("up", "starting"):
            assert process.supervisor is not None
            code = process.supervisor.poll()
            late = (
                process.state == "starting"
                and now - process.state_since > self.launch.config.start_timeout
            )
            if code is not None or late:
                self._handle_exit(process, code)
            elif process.state == "starting" and self._answers(process):
                with self._lock:
                    process.state = "up"
                    process.state_since = time.monotonic()
                    self._changes.restarted.append(process.url)
                self._log(f"{self._name(process)} answers again")

    def _handle_exit(self, process: _ServerProcess, code: int | None) -> None:
        reason = self._exit_line(process, code)
        if process.state == "up" and time.monotonic() - process.state_since > STABLE_SECONDS:
            process.restarts = 0
        self._kill(process)
        _wait_until_gone(process)
        with self._lock:
            if process.state == "up":
                self._changes.died.append(process.url)
            self._schedule_restart(process)
        if process.state == "given up":
            self._log(f"{reason}; given up after {self.max_restarts} restarts")
        else:
            self._log(f"{reason}; restarting it ({process.restarts} of {self.max_restarts})")

    def _schedule_restart(self, process: _ServerProcess) -> None:
        process.state_since = time.monotonic()
        if process.restarts >= self.max_restarts:
            process.state = "given up"
            self._changes.given_up.append(process.url)
            return
        process.state = "down"
        process.restart_at = process.state_since + min(
            _RESTART_SECONDS * 2**process.restarts, _MAX_RESTART_SECONDS
        )
        process.restarts += 1


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_healthy(url: str) -> bool:
    """Whether GET /health answers 200. It needs no key, and no proxy of the environment is used."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=_HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait_until_gone(process: _ServerProcess) -> None:
    """Until no process of a killed group is left that could hold memory or the port."""
    if process.supervisor is None:
        return
    deadline = time.monotonic() + _KILL_SECONDS
    while _group(process.supervisor.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.supervisor.wait(1.0)


def _group(group: int) -> list[int]:
    """Ids of the processes of a group that run: one that has ended and waits for its parent
    holds nothing.
    """
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members
