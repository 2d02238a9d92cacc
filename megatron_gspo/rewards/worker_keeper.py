"""Ends a worker with every process that it started, whatever groups, sessions and parents they have
made themselves.

A process of its own between the trainer and the worker, because neither can do it: the trainer may
be killed, and the worker runs what it would have to end. Orphans of the worker become the keeper's
children (`PR_SET_CHILD_SUBREAPER`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 5.0  # until processes that can't be killed are left alone
_POLL_SECONDS = 1.0  # between looks at the parent


def fork_worker(parent: int, connection: int) -> None:
    """Returns in a new process, the worker's. The calling process becomes its keeper and ends with
    the worker's status.

    The worker and all that it started end when it ends, when the keeper gets SIGTERM, and within a
    second after the process `parent` has died. connection: a file descriptor of the worker, which
    the keeper closes.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watched = {signal.SIGCHLD, signal.SIGTERM}
    # A parent that ignores it would take the status away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        os.close(connection)
        status = _end_of(worker, parent, watched)
        _end_children()
        _exit_like(status)
    os.setsid()  # a verifier that signals its process group does not reach the keeper
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)


def _end_of(worker: int, parent: int, watched: set[signal.Signals]) -> int:
    """Wait for the worker's end, or cause it; its status."""
    while True:
        event = signal.sigtimedwait(watched, _POLL_SECONDS)
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == worker:
                return status
            if ended == 0:
                break
        if os.getppid() != parent or (event is not None and event.si_signo == signal.SIGTERM):
            os.kill(worker, signal.SIGKILL)  # one that is ending by itself keeps its status
            return os.waitpid(worker, 0)[1]


def _end_children() -> None:
    """Kill and reap all children; the children of a killed one become ours."""
    give_up = time.monotonic() + _END_SECONDS
    while time.monotonic() < give_up:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there is none
            return
        for child in _children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _children() -> list[int]:
    """Process ids of this process's children. A worker's interpreter may have no psutil."""
    keeper = os.getpid()
    children = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        # The name before ")" is the program's choice; behind it are the state and the parent.
        with contextlib.suppress(OSError):
            fields = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")[2]
            if int(fields.split()[1]) == keeper:
                children.append(int(process))
    return children


def _exit_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
