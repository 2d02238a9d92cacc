"""The processes that write one rank's files of a checkpoint while the rank continues training.

Megatron plans a save, brings tensors to host memory and writes a file; who runs its writer is left to the caller. Its
own callers fork too, but before 0.19 their writers fork again and wait forever for a writer that was killed, none of
them dies with its rank, and results come through a server process that imports the whole program and outlives a killed
rank. A thread would share the interpreter's lock with the training: torch.save holds it while it copies and sums.

A fork is a snapshot: the system copies a page before training changes it. The child touches no collective, no GPU, no
signal of the rank, and dies with it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_gspo.errors import first_line

_PR_SET_PDEATHSIG = 1
_NICENESS = 5  # where there are too few cores for both, training comes first


class Writers:
    """One process for each job. ``results``: job number -> its value, as they come. ``failure``: the first reason why
    there is none, "" as long as all is well; the other jobs are ended then."""

    def __init__(self, jobs: Sequence[Callable[[], Any]]) -> None:
        self.results: dict[int, Any] = {}
        self.failure = ""
        self._running: dict[Connection, tuple[int, Any]] = {}
        try:
            for number, job in enumerate(jobs):
                self._start(number, job)
        except BaseException:
            self.end()
            raise

    def _start(self, number: int, job: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, sender, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork while other threads run: see above
            process.start()
        sender.close()  # so that the child's end is the pipe's
        self._running[receiver] = number, process

    @property
    def pids(self) -> list[int]:
        """Of the writers that are at work."""
        return [process.pid for _, process in self._running.values()]

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Take the results that have come within ``timeout`` seconds (None: of all jobs); whether all jobs are over."""
        while self._running and (ready := wait(list(self._running), timeout)):
            for pipe in ready:
                if pipe in self._running:  # an earlier one may have ended it
                    self._take(pipe)
        return not self._running

    def end(self) -> None:
        """Kill what is at work."""
        for pipe, (_, process) in self._running.items():
            process.kill()
            process.join()
            pipe.close()
        self._running = {}

    def _take(self, pipe: Any) -> None:
        number, process = self._running.pop(pipe)
        try:
            value, failure = pipe.recv()
            self.results[number] = value
        except (EOFError, OSError):
            failure = ""
        pipe.close()
        process.join()
        if number not in self.results:
            code = process.exitcode
            failure = f"a writer was ended by signal {-code}" if code < 0 else f"a writer left with exit code {code}"
        if failure:
            self.failure = self.failure or failure
            self.end()


def file_jobs(buckets: Sequence[Any], transforms: list[Any], use_msc: bool) -> list[Callable[[], Any]]:
    """What writes each of Megatron's buckets (path, key, (bytes, tensors on the CPU)) and returns what it wrote."""
    return [partial(_write, number, bucket, transforms, use_msc) for number, bucket in enumerate(buckets)]


def _write(number: int, bucket: Any, transforms: list[Any], use_msc: bool) -> Any:
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()  # Megatron's writer takes its number from there at the end
    count.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, count, True, use_msc=use_msc)
    _, found = results.get_nowait()
    if isinstance(found, Exception):
        raise found
    return found


def _work(job: Callable[[], Any], sender: Connection, parent: int) -> None:
    """The child's whole life."""
    _die_with(parent)
    os.nice(_NICENESS)
    gc.disable()  # garbage of the rank's GPU is not the child's to free
    signal.set_wakeup_fd(-1)  # a signal to the child must not wake the rank
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):  # to the whole group of processes: the rank decides
        signal.signal(number, signal.SIG_IGN)
    try:
        answer = job(), ""
    except Exception as error:
        answer = None, f"{type(error).__name__}: {first_line(error)}"
    sender.send(answer)


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies; elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
