"""A pool of reward workers: processes that can hang or die without affecting the training process.

Not pebble's ProcessPool: its spawned workers import the training script, a timeout leaves the
processes that a verifier started, and a worker in a long regular expression outlives a trainer that
is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import InputError
from megatron_gspo.launch_environment import own_import_path
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)


def _prompt_of(request: tuple[object, Prompt | list[Prompt]]) -> Prompt:
    """The prompt of a response, or the first of a batch."""
    _, prompts = request
    return prompts[0] if isinstance(prompts, list) else prompts


@dataclass(frozen=True)
class Served:
    """What the workers of a pool run."""

    module: str = "megatron_gspo.rewards.worker"
    """Module that is started with `python -m`, see `worker.serve`."""

    what: str = "verifier"
    """What messages call it."""

    refusal: type[InputError] = VerifierError
    """Class of the error if it can't be loaded."""

    prompt_of: Callable[[Any], Prompt] = _prompt_of
    """Function that returns the prompt of a request."""


# Of one response until a line tells of it; half of the time limit if that is less.
_NOTICE_SECONDS = 10.0
_NOTICE_INTERVAL = 30.0  # seconds between such lines
_MAX_GROWTH = 4 << 30  # bytes of memory that a worker may gain before it is replaced
_START_TIMEOUT = 120.0  # seconds for a worker to start and load the verifier
_END_SECONDS = 15.0  # for a keeper to end its worker with all processes
_MAX_FAILED_STARTS = 3  # in a row; then the worker is not replaced


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float | None  # monotonic seconds; None while idle
    ready: bool = False
    task: int | None = None
    failed_starts: int = 0
    began: float = 0.0  # monotonic seconds, of the task


class _Output:
    """What the workers print: whole lines on our stderr, so that they don't run into the
    progress line.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._rest = b""

    def fileno(self) -> int:
        return self._reader

    def show(self) -> bool:
        """Print the lines that are complete, at most 64 KiB; whether there was anything to read."""
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 16:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            logger.info(f"{self._source}: {line.decode(errors='replace')}")
        return bool(data)

    def close(self) -> None:
        """Print the rest. The workers have ended."""
        os.close(self.writer)
        while self.show():
            pass
        if self._rest:
            logger.info(f"{self._source}: {self._rest.decode(errors='replace')}")
        os.close(self._reader)


class RewardPool:
    """Long-lived worker processes, each with its own pipe and the verifier loaded.

    A worker that exceeds the time limit is killed with all processes that it started, and replaced;
    so is one that dies. If replacements can't start, the remaining requests are errors: `run` never
    raises for what a verifier does.

    Attributes:
        description: what the verifier says of itself in one line, None for nothing.
        takes_batch: whether a request has lists of responses and prompts.
    """

    def __init__(
        self,
        verifier: str,
        options: dict[str, Any] | None = None,
        *,
        timeout: float,
        workers: int = 1,
        served: Served | None = None,
    ):
        """Start a worker and wait until it has loaded the verifier. Others start with the first
        requests that keep them busy.

        Raises VerifierError (or `served.refusal`) in one line if it can't be loaded.

        Args:
            timeout: seconds per response.
            workers: how many there are at most.
            served: what the workers run; default a verifier.
        """
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; it must be above 0 seconds")
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self._served = served or Served()
        self._first_message = pickle.dumps((verifier, options))
        self._timeout = timeout
        self.description: str | None = None
        self.takes_batch = False
        self._name = f"{self._served.what} {verifier!r}"
        self._output = _Output(self._served.what)
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(
            self, _stop_all, self._workers, self._output, os.getpid()
        )
        self._last_failure = "no reward worker could be started"
        self._max_workers = workers
        self._num_wanted = 0
        self._want(1)
        self._await_first()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def run(self, requests: Sequence[Any]) -> list[Reply]:
        """Score (response text, prompt) pairs: a reply for each, in their order."""
        if not self._finalizer.alive:
            raise RuntimeError("the reward pool is closed; make a new one")
        for worker in list(self._workers):
            if worker.task is not None:  # of an interrupted run
                self._replace(worker)
        self._want(len(requests))
        replies: list[Reply | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        next_notice = 0.0
        while waiting or any(worker.task is not None for worker in self._workers):
            self._assign(requests, waiting)
            if not self._workers:
                break
            next_notice = self._notice(requests, replies, next_notice)
            self._collect(replies, until=next_notice)
        lost = Reply("error", message=self._last_failure)
        return [lost if reply is None else reply for reply in replies]

    def release(self) -> None:
        """End the workers until there are requests again."""
        _end_workers(self._workers)
        self._num_wanted = 0

    def close(self) -> None:
        """Kill and reap the workers.

        Also done when the pool is garbage-collected and at interpreter exit.
        """
        self._finalizer()

    def _want(self, count: int) -> None:
        """Start workers for so many requests at a time; one that could not be replaced is not
        started again."""
        while self._num_wanted < min(count, self._max_workers):
            self._num_wanted += 1
            try:
                self._workers.append(self._start())
            except OSError as error:  # out of memory or processes: continue with the others
                self._last_failure = f"no reward worker could be started: {error}"

    def _start(self, failed_starts: int = 0) -> _Worker:
        connection, worker_connection = Pipe()
        command = [sys.executable, "-m", self._served.module]
        with worker_connection:
            descriptor = worker_connection.fileno()
            process = subprocess.Popen(
                [*command, str(descriptor), str(os.getpid()), str(_MAX_GROWTH)],
                stdin=subprocess.DEVNULL,
                stdout=self._output.writer,
                stderr=self._output.writer,
                pass_fds=[descriptor],
                start_new_session=True,  # not interrupted by Ctrl-C
                env={"OMP_NUM_THREADS": "1", **os.environ, **own_import_path()},
            )
        connection.send_bytes(self._first_message)
        deadline = time.monotonic() + _START_TIMEOUT
        return _Worker(process, connection, deadline, failed_starts=failed_starts)

    def _await_first(self) -> None:
        """Wait until one worker has loaded the verifier. Raises the refusal if none can."""
        while not any(worker.ready for worker in self._workers):
            self._collect([], starting=True)
            if not self._workers:
                self.close()
                raise self._served.refusal(self._last_failure)

    def _assign(self, requests: Sequence[Any], waiting: deque[int]) -> None:
        for worker in list(self._workers):
            if not waiting:
                return
            if not worker.ready or worker.task is not None:
                continue
            try:
                worker.connection.send_bytes(pickle.dumps(requests[waiting[0]]))
            except OSError:  # it died while idle: no response has failed
                self._replace(worker)
                continue
            worker.task = waiting.popleft()
            worker.began = time.monotonic()
            worker.deadline = worker.began + self._timeout

    def _notice(
        self, requests: Sequence[Any], replies: Sequence[Reply | None], due: float
    ) -> float:
        """Tell of a response that takes long, if that is due; returns when the next line is due."""
        now = time.monotonic()
        busy = [
            worker
            for worker in self._workers
            if worker.task is not None and worker.deadline is not None
        ]
        if not busy:
            return 0.0
        longest = min(busy, key=lambda worker: worker.began)
        due = max(due, longest.began + min(_NOTICE_SECONDS, self._timeout / 2))
        if now < due:
            return due
        assert longest.task is not None and longest.deadline is not None
        index = self._served.prompt_of(requests[longest.task]).index
        done = sum(reply is not None for reply in replies)
        logger.warning(
            f"{self._name}: a response to prompt {index} takes {now - longest.began:.0f} s so far"
            f" and is ended in {max(longest.deadline - now, 0.0):.0f} s; {done} of {len(requests)}"
            " are done"
        )
        return now + _NOTICE_INTERVAL

    def _collect(
        self, replies: list[Reply | None], *, starting: bool = False, until: float = 0.0
    ) -> None:
        """Wait for the next reply, death, deadline or output, and handle all that are due. until:
        monotonic seconds at which a wait ends in any case; 0 for none."""
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        if until:
            deadlines.append(until)
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else 0.0
        busy = [worker.connection for worker in self._workers if worker.deadline is not None]
        readable = wait([*busy, self._output.fileno()], seconds)
        self._output.show()
        for worker in list(self._workers):
            if worker.connection in readable:
                self._receive(worker, replies, starting)
            elif worker.deadline is not None and time.monotonic() >= worker.deadline:
                limit = self._timeout if worker.ready else _START_TIMEOUT
                late = Reply("timeout", message=f"no result after {limit:g} s")
                self._fail(worker, replies, late, starting)

    def _receive(self, worker: _Worker, replies: list[Reply | None], starting: bool) -> None:
        try:
            fields = json.loads(worker.connection.recv_bytes())
            is_last = fields.pop("last")
            reply = Reply(**fields)
        except (EOFError, OSError, ValueError, KeyError, TypeError, AttributeError):
            _kill(worker)
            code = worker.process.returncode
            cause = f"exit code {code}"
            if code < 0:
                cause = signal.strsignal(-code) or f"signal {-code}"
            ended = Reply("error", message=f"the {self._served.what}'s process ended ({cause})")
            self._fail(worker, replies, ended, starting)
            return
        if worker.ready:
            assert worker.task is not None
            replies[worker.task] = reply
            worker.task = None
            worker.deadline = None
            if is_last:
                self._replace(worker)
        elif reply.status == "ok":
            worker.ready = True
            worker.deadline = None
            worker.failed_starts = 0
            self.description = reply.message
            self.takes_batch = bool(reply.value)
        else:
            self._fail(worker, replies, reply, starting)

    def _fail(
        self, worker: _Worker, replies: list[Reply | None], reply: Reply, starting: bool
    ) -> None:
        """Kill a worker; its response gets `reply`.

        It is replaced unless replacements fail to start too.
        """
        if worker.task is not None:
            replies[worker.task] = reply
        if worker.ready:
            self._replace(worker)
            return
        self._last_failure = f"the {self._served.what} could not be loaded: {reply.message}"
        if starting or worker.failed_starts + 1 >= _MAX_FAILED_STARTS:
            _kill(worker)
            self._workers.remove(worker)
        else:
            self._replace(worker, worker.failed_starts + 1)

    def _replace(self, worker: _Worker, failed_starts: int = 0) -> None:
        _kill(worker)
        position = self._workers.index(worker)
        try:
            self._workers[position] = self._start(failed_starts)
        except OSError as error:  # out of memory or processes: continue with the other workers
            self._last_failure = f"no reward worker could be started: {error}"
            del self._workers[position]


def _kill(worker: _Worker) -> None:
    """End a worker with all processes that it started; see `worker_keeper`."""
    if worker.process.returncode is not None:  # done before
        return
    worker.connection.close()
    worker.process.terminate()
    try:
        worker.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:  # its keeper was stopped; the worker ends with it
        worker.process.kill()
        worker.process.wait()


def _stop_all(workers: list[_Worker], output: _Output, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the training process
        return
    _end_workers(workers)
    output.close()


def _end_workers(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        _kill(worker)
    workers.clear()
