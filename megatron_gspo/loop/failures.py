"""Failure handling: when one process of a run fails, all end within seconds, with one line that
states the reason.

A rank that fails writes its reason to the store that all ranks share; the first reason is used.
Every rank checks the store each second, so none waits in a collective for a peer that has left.
Each node prints the line once.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_gspo.config import ConfigError
from megatron_gspo.config.cli import refuse
from megatron_gspo.errors import UserError, first_line, printable, report
from megatron_gspo.launch_environment import tell_torchrun
from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint
from megatron_gspo.mcore.process_groups import shutdown, start
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_KEY = "failures/first"
_SEEN = "failures/seen"
_POLL = 1.0  # seconds between two checks of the store
_GRACE = 3.0  # seconds that a rank has to leave by itself once another has failed
_LINGER = 6.0  # most seconds that the store's host waits for the others to read the reason
_COMMUNICATION = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|timed out"
    r" waiting|socket ?timeout",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends: the rank that failed first, its node, its line and the exit code."""

    rank: int
    node: str
    label: str
    message: str
    exit_code: int


def lost_contact(error: BaseException) -> bool:
    """Whether an exception is a collective or the store failing because another rank is missing."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _COMMUNICATION.search(str(error)) is not None


def _summary(error: BaseException) -> str:
    """The first sentence of a communication error, without its source location."""
    return re.sub(r"^(\[[^\]]*:\d+\]\s*)+", "", first_line(error)).split(". ")[0]


class exit_together:  # noqa: N801  # a context manager, used like a function
    """Start ``torch.distributed``, and end all ranks together: ``with exit_together(...):
    train(config)``.

    A ``UserError`` in the context prints its one line, any other exception its traceback; both end
    the other ranks too and become ``SystemExit`` with the exit code. A rank that died without a
    message shows as lost contact within ``timeout_minutes``, immediately if its connection breaks.
    """

    def __init__(self, *, run_dir: str | Path, backend: str, timeout_minutes: float) -> None:
        self._run_dir = Path(run_dir)
        self._backend = backend
        self._minutes = timeout_minutes

    def __enter__(self) -> None:
        try:
            store = start(backend=self._backend, timeout_minutes=self._minutes)
        except ConfigError as error:  # the same on every rank
            refuse(error)
        except UserError as error:
            tell_torchrun(f"{error.label}: {error}")
            raise SystemExit(report(error)) from None
        self._watcher = _Watcher(store, self._run_dir)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._leave()
                return
            except BaseException as failure:
                error = failure
        code = self._watcher.settle(error)
        # Among several a group may wait for a rank that is gone; exiting ends it too.
        if dist.get_world_size() == 1:
            self._watcher.close()
            shutdown()
        else:
            self._watcher.rest()
        raise SystemExit(code) from None

    def _leave(self) -> None:
        _wait_for_all()  # watched: a rank may still fail at its last file
        self._watcher.close()
        _wait_for_all()  # now no rank needs the store, which runs in one of them
        shutdown()


def _wait_for_all() -> None:
    """A barrier. With NCCL it is told its GPU: else torch warns that it takes the current one."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


class _Watcher:
    """This rank's view of the others' failures: a thread of its own, because the main one waits
    in collectives.
    """

    def __init__(self, store: dist.Store, run_dir: Path) -> None:
        # a connection of its own: the main thread may hold the other one, waiting for a rank that
        # is gone
        self._store = store.clone() if hasattr(store, "clone") else store
        self._run_dir = run_dir
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        elastic = "TORCHELASTIC_RUN_ID" in os.environ
        self._node = (
            os.environ.get("GROUP_RANK", "0")
            if elastic
            else f"{socket.gethostname()}:{os.getpid()}"
        )
        self._prints = not elastic or os.environ.get("LOCAL_RANK", "0") == "0"
        self._once = threading.Lock()  # held by the thread that ends this process
        self._closed = threading.Event()
        self._signals, wake = socket.socketpair()
        self._signals.settimeout(_POLL)  # no select: a large run has descriptors beyond its limit
        wake.setblocking(False)
        self._wake = wake  # keeps the socket open
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before)
        self._wake.close()  # wakes the thread
        self._thread.join()
        self._signals.close()

    def rest(self) -> None:
        """End the watching thread before the interpreter ends: a thread waiting for the store then
        aborts the process.

        Signals stay as they are, since torchrun sends SIGTERM as soon as another rank has ended.
        """
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(_GRACE)

    def settle(self, error: BaseException) -> int:
        """Handle this rank's exception: record or look up the reason, print it once, return the
        exit code.
        """
        if not self._once.acquire(blocking=False):
            time.sleep(2 * _LINGER)  # the watching thread is about to end this process
        if isinstance(error, UserError):
            failure = self._failure(str(error), error.label, error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            failure = self._failure(f"interrupted; {self._next()}", exit_code=130)
        elif lost_contact(error):
            time.sleep(0.5)  # a reason may be about to be written
            failure = self._failure(
                f"lost contact with another rank ({_summary(error)}): it died or hung, its log has"
                " the reason; " + self._next()
            )
        else:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
            failure = self._failure(
                f"{type(error).__name__}: {first_line(error)} (the traceback is in its log)"
            )
        return self._end(failure)

    def _failure(self, message: str, label: str = "error", exit_code: int = 1) -> Failure:
        return Failure(self._rank, self._node, label, message, exit_code)

    def _next(self) -> str:
        try:
            newest, _ = newest_checkpoint(self._run_dir / "checkpoints")
        except UserError:  # a folder that can't be read
            newest = None
        if newest:
            return f"start again to resume from {newest}"
        return (
            "there is no checkpoint yet, start again from the first step "
            "(checkpoint.save_interval: n saves one every n steps)"
        )

    def _end(self, failure: Failure) -> int:
        """Publish the failure unless another failure came first, print what this node hasn't
        printed, wait for readers.
        """
        first = failure
        try:
            if self._world > 1:
                first = Failure(
                    **json.loads(self._store.compare_set(_KEY, "", json.dumps(asdict(failure))))
                )
                self._store.add(_SEEN, 1)
        except RuntimeError:  # the store went down with the rank that held it
            pass
        where = f"rank {first.rank}: " if self._world > 1 else ""
        line = printable(f"{first.label}: {where}{first.message}")
        tell_torchrun(line)
        if first == failure or (first.node != self._node and self._prints):
            logger.error(line)
        if self._rank == 0 and self._world > 1:
            self._linger()
        return first.exit_code

    def _linger(self) -> None:
        """Stay until every rank has read the reason: without torchrun the store is in this
        process.
        """
        end = time.monotonic() + _LINGER
        try:
            while self._store.add(_SEEN, 0) < self._world and time.monotonic() < end:
                time.sleep(0.1)
        except RuntimeError:
            pass

    def _watch(self) -> None:
        while True:
            received = b""
            with contextlib.suppress(TimeoutError):
                received = self._signals.recv(64)
            if self._closed.is_set():
                return
            if signal.SIGTERM in received:
                self._leave(
                    "stopped by SIGTERM, as a scheduler does, or torchrun when a rank ends;"
                    f" {self._next()}"
                )
            try:
                failed = self._world > 1 and self._store.check([_KEY])
            except RuntimeError:  # its host is gone: the main thread's next collective fails
                return
            if failed:
                if not self._once.locked():
                    _thread.interrupt_main()
                if self._closed.wait(_GRACE):
                    return
                self._leave("")

    def _leave(self, message: str) -> None:
        """End this process from the watching thread, unless the main thread is ending it."""
        if self._once.acquire(blocking=False):
            code = self._end(self._failure(message, exit_code=143 if message else 1))
            os._exit(code)
        threading.Event().wait()
