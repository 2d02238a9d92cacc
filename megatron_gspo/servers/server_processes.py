"""Local SGLang servers: started together, monitored, restarted when they die, and ended with the trainer.

Each server is a process group of its own under a supervisor (`supervisor.py`) that ends the group with the trainer. A
server has no state to save, so it is ended by SIGKILL: a regular shutdown takes nine seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_gspo.errors import EngineError, UserError, writing
from megatron_gspo.servers.launch_command import (
    LOOPBACK,
    PORT_IN_USE,
    ServerSettings,
    check_model,
    choose_ports,
    explain_end,
    on_cpu,
    server_command,
    server_environment,
    sglang_version,
    write_secret,
)

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25  # seconds between two looks at a server
STABLE = 600.0  # seconds after which a server that ran counts as well again
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0  # seconds before a restart, doubling in between
_ASK = 2.0  # seconds that /health may take
_VANISH = 10.0  # seconds that a killed group may take to be gone
_LOG_TAIL = 64 * 1024  # bytes of a log that an error is looked for in
_PORT_TRIES = 3  # of a start on ports of our choice, which another process may take in between


@dataclass
class Changes:
    """URLs of servers that, since the last look, died, answer again (with the weights of the model's directory), or
    died too often to be started again."""

    died: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.died or self.restarted or self.given_up)


@dataclass
class _Life:
    """One server. state: "starting", "up", "down" (to be started again) or "given up"."""

    index: int
    port: int
    url: str
    log: Path
    state: str = "starting"
    guard: subprocess.Popen[bytes] | None = None
    log_start: int = 0  # bytes that earlier lives wrote
    since: float = 0.0  # when this state began
    again: float = 0.0  # when to start it again
    restarts: int = 0  # in a row
    secret: str | None = None  # file with the API key, until it has been read


class LocalServers:
    """`settings.count` servers on this machine. Also a context manager: `with LocalServers(settings) as servers`.

    say: gets a line for what happens to them: that they're up, why one ended.
    """

    def __init__(self, settings: ServerSettings, *, say: Callable[[str], None] = logger.warning) -> None:
        self.settings = settings
        self._say = say
        self._lives: list[_Life] = []
        self._changes = Changes()
        self._lock = threading.Lock()  # over lives and changes
        self._ending = threading.Event()
        self._paused = False
        self._watcher: threading.Thread | None = None
        self._cpu, self._version = True, (0,)

    def __enter__(self) -> LocalServers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """URLs of all servers, by index; the same for as long as they're watched."""
        return [life.url for life in self._lives]

    @property
    def logs(self) -> list[Path]:
        """Log files, by index."""
        return [life.log for life in self._lives]

    def start(self) -> list[str]:
        """Start all servers at once, wait until each answers and watch them from then on; returns their URLs.

        Raises InputError (interpreter, model, arguments, ports) or EngineError (a server that ends or doesn't answer
        within `start_timeout`), after all were ended.
        """
        settings = self.settings
        check_model(settings.model)
        self._cpu, self._version = on_cpu(settings), sglang_version(settings.python)
        with writing(settings.log_dir):
            Path(settings.log_dir).mkdir(parents=True, exist_ok=True)
        ports = choose_ports(settings)
        for index, port in enumerate(ports):
            log = Path(settings.log_dir) / f"server_{index}.log"
            self._lives.append(_Life(index, port, _url(settings.host, port), log))
        try:
            began = time.monotonic()
            for life in self._lives:
                self._launch(life)
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        seconds = time.monotonic() - began
        self._say(f"{', '.join(self.urls)} answer after {seconds:.0f} s")
        self._ending.clear()
        self._watcher = threading.Thread(target=self._watch, name="sglang-servers", daemon=True)
        self._watcher.start()
        return self.urls

    def poll(self) -> Changes:
        """What changed since the last call. Returns at once: the watching is done by a thread."""
        with self._lock:
            changes, self._changes = self._changes, Changes()
        return changes

    def restart(self, url: str) -> None:
        """End a server that runs but doesn't answer; it's started again like one that died by itself."""
        with self._lock:
            for life in self._lives:
                if life.url == url and life.state in ("up", "starting"):
                    self._kill(life)

    def pause(self) -> None:
        """Start nothing until `resume`: for as long as the trainer needs the memory that a server would take."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> None:
        """End all servers and their children. May be called again."""
        self._ending.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        with self._lock:
            for life in self._lives:
                self._kill(life)
            for life in self._lives:
                _wait_until_gone(life)
            self._lives = []

    # -- one server ----------------------------------------------------------------------------------------------

    def _launch(self, life: _Life) -> None:
        settings = self.settings
        life.secret = write_secret(settings.api_key) if settings.api_key else None
        command = server_command(
            settings, life.index, life.port, cpu=self._cpu, version=self._version, config=life.secret
        )
        hide = ["--hide"] if settings.api_key else []  # sglang writes its settings into the log, the key among them
        program = [settings.python, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
        guard = [*program, *hide, str(os.getpid()), *command]
        with writing(life.log), open(life.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            life.log_start = os.fstat(log.fileno()).st_size
            life.guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE if hide else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(settings, cpu=self._cpu),
                start_new_session=True,
            )
        if life.guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError), life.guard.stdin as stdin:  # one that ended at once: told later
                stdin.write((settings.api_key or "").encode())
        life.state, life.since = "starting", time.monotonic()

    def _kill(self, life: _Life) -> None:
        if life.secret is not None:
            Path(life.secret).unlink(missing_ok=True)
            life.secret = None
        if life.guard is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(life.guard.pid, signal.SIGKILL)

    def _answers(self, life: _Life) -> bool:
        if not _is_healthy(life.url):
            return False
        if life.secret is not None:  # read by now
            Path(life.secret).unlink(missing_ok=True)
            life.secret = None
        if self._cpu:
            _freeze_garbage(life.url, self.settings.api_key)
        return True

    def _why(self, life: _Life, code: int | None) -> str:
        """One line about the end of a server's present life, without the API key."""
        text = ""
        with contextlib.suppress(OSError), open(life.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(life.log_start, size - _LOG_TAIL))
            text = file.read().decode(errors="replace")
        if self.settings.api_key:
            text = text.replace(self.settings.api_key, "***")
        return f"sglang server {life.index} ({life.url}): {explain_end(text, code)}; see {life.log}"

    # -- start ---------------------------------------------------------------------------------------------------

    def _wait_until_up(self) -> None:
        tries = 1
        while waiting := [life for life in self._lives if life.state == "starting"]:
            for life in waiting:
                assert life.guard is not None
                code = life.guard.poll()
                late = time.monotonic() - life.since > self.settings.start_timeout
                if code is None and self._answers(life):
                    life.state, life.since = "up", time.monotonic()
                elif code is not None or late:
                    reason = self._why(life, code)
                    if PORT_IN_USE not in reason or self.settings.base_port is not None or tries >= _PORT_TRIES:
                        raise EngineError(reason)
                    tries += 1
                    self._move(life)
            time.sleep(LOOK_EVERY)

    def _move(self, life: _Life) -> None:
        """Try another port of our choice."""
        self._kill(life)
        _wait_until_gone(life)
        life.port = choose_ports(self.settings, avoid=[other.port for other in self._lives])[0]
        life.url = _url(self.settings.host, life.port)
        self._launch(life)

    # -- watch ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_EVERY):
            for life in self._lives:
                try:
                    self._look(life)
                except (OSError, UserError, psutil.Error) as error:  # no process, no memory for one, a full disk
                    self._say(f"sglang server {life.index} ({life.url}): {error}")
                    with self._lock:
                        self._put_down(life)

    def _look(self, life: _Life) -> None:
        now = time.monotonic()
        if life.state == "down" and now >= life.again and not self._paused:
            with self._lock:
                self._launch(life)
        elif life.state in ("up", "starting"):
            assert life.guard is not None
            code = life.guard.poll()
            late = life.state == "starting" and now - life.since > self.settings.start_timeout
            if code is not None or late:
                self._note_end(life, code)
            elif life.state == "starting" and self._answers(life):
                with self._lock:
                    life.state, life.since = "up", time.monotonic()
                    self._changes.restarted.append(life.url)
                self._say(f"sglang server {life.index} ({life.url}) answers again")

    def _note_end(self, life: _Life, code: int | None) -> None:
        reason = self._why(life, code)
        if life.state == "up" and time.monotonic() - life.since > STABLE:
            life.restarts = 0
        self._kill(life)
        _wait_until_gone(life)
        with self._lock:
            if life.state == "up":
                self._changes.died.append(life.url)
            self._put_down(life)
        if life.state == "given up":
            self._say(f"{reason}; it's given up after {self.settings.max_restarts} restarts")
        else:
            self._say(f"{reason}; starting it again ({life.restarts} of {self.settings.max_restarts})")

    def _put_down(self, life: _Life) -> None:
        life.since = time.monotonic()
        if life.restarts >= self.settings.max_restarts:
            life.state = "given up"
            self._changes.given_up.append(life.url)
            return
        life.state = "down"
        life.again = life.since + min(_FIRST_DELAY * 2**life.restarts, _LONGEST_DELAY)
        life.restarts += 1


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_healthy(url: str) -> bool:
    """Whether GET /health answers 200; it's open without a key. No proxy of the environment is asked."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=_ASK)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _freeze_garbage(url: str, api_key: str | None) -> None:
    """Leave what a server has loaded out of its garbage collections, as sglang does itself after its warm-up, which
    servers on a CPU skip. Each flush of the cache, so each update of the weights, collects there: 0.4 s saved."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_ASK)
    try:
        connection.request("POST", "/freeze_gc", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # it only costs time
    finally:
        connection.close()


def _wait_until_gone(life: _Life) -> None:
    """Until no process of a killed group is left that could hold memory or the port."""
    if life.guard is None:
        return
    deadline = time.monotonic() + _VANISH
    while _group(life.guard.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        life.guard.wait(1.0)


def _group(group: int) -> list[int]:
    """Ids of the processes of a group that run: one that has ended and waits for its parent holds nothing."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
