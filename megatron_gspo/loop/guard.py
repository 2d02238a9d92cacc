"""How the processes of a run end when one of them fails: all of them, soon, with one line that says why.

A rank that fails leaves its reason in the store that all ranks share, where the first reason counts. Every rank looks
there each second, so that none waits in a collective for a peer that has left; torchrun's copies of a line are spared.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_gspo.errors import UserError, first_line
from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint
from megatron_gspo.mcore.process_groups import shutdown, start

_KEY, _SEEN = "guard/failure", "guard/seen"
_POLL = 1.0  # seconds between two looks into the store
_GRACE = 3.0  # seconds that a rank has to leave by itself once another has failed
_LINGER = 6.0  # most seconds that the store's host waits for the others to read the reason
_COMMUNICATION = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|timed out waiting|socket ?timeout", re.I
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends: the rank that said so first, where it runs, its line and the exit code."""

    rank: int
    node: str
    label: str
    message: str
    exit_code: int


def lost_contact(error: BaseException) -> bool:
    """Whether an exception says that a collective or the store failed for want of another rank."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _COMMUNICATION.search(str(error)) is not None


def _words(error: BaseException) -> str:
    """The first sentence of a communication error, without the place in its source."""
    return re.sub(r"^(\[[^\]]*:\d+\]\s*)+", "", first_line(error)).split(". ")[0]


def run_guarded(action: Callable[[], Any], *, run_dir: str | Path, backend: str, timeout_minutes: float) -> int:
    """Start ``torch.distributed``, run ``action`` on this rank and return the exit code, 0 where every rank succeeded.

    A ``UserError`` prints its one line, anything else its traceback; both end the other ranks too. A rank that died
    without a word shows as lost contact within ``timeout_minutes``, at once where its connection breaks.
    """
    try:
        store = start(backend=backend, timeout_minutes=timeout_minutes)
    except UserError as error:
        print(f"{error.label}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    guard = _Guard(store, Path(run_dir))
    try:
        action()
        dist.barrier()  # watched: a rank may still fail at its last file
        guard.close()
        dist.barrier()  # now no rank needs the store, which lives in one of them
        shutdown()
        return 0
    except BaseException as error:
        code = guard.settle(error)
        if dist.get_world_size() == 1:  # among several a group may wait for a rank that is gone; exiting ends it too
            guard.close()
            shutdown()
        else:
            guard.rest()
        return code


class _Guard:
    """This rank's watch over the others: a thread of its own, because the main one waits in collectives."""

    def __init__(self, store: dist.Store, run_dir: Path) -> None:
        # a connection of its own: the main thread may hold the other one, waiting for a rank that is gone
        self._store = store.clone() if hasattr(store, "clone") else store
        self._run_dir = run_dir
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        elastic = "TORCHELASTIC_RUN_ID" in os.environ
        self._node = os.environ.get("GROUP_RANK", "0") if elastic else f"{socket.gethostname()}:{os.getpid()}"
        self._speaks = not elastic or os.environ.get("LOCAL_RANK", "0") == "0"
        self._once = threading.Lock()  # held by whoever ends this process
        self._closed = threading.Event()
        self._signals, wake = socket.socketpair()
        self._signals.settimeout(_POLL)  # no select: a large run has descriptors beyond its limit
        wake.setblocking(False)
        self._wake = wake  # the socket must outlive its number
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
        """End the watching thread before the interpreter ends: one that then waits for the store aborts the process.

        Signals stay as they are, since torchrun sends SIGTERM as soon as another rank has ended.
        """
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(_GRACE)

    def settle(self, error: BaseException) -> int:
        """Deal with this rank's exception: record or look up the reason, print it once, return the exit code."""
        if not self._once.acquire(blocking=False):
            time.sleep(2 * _LINGER)  # the watching thread is about to end this process
        if isinstance(error, UserError):
            mine = self._failure(str(error), error.label, error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            mine = self._failure(f"interrupted; {self._next()}", exit_code=130)
        elif lost_contact(error):
            time.sleep(0.5)  # a reason may be about to be written
            mine = self._failure(
                f"lost contact with another rank ({_words(error)}): it died or hung, its log has the reason; "
                + self._next()
            )
        else:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
            mine = self._failure(f"{type(error).__name__}: {first_line(error)} (the traceback is in its log)")
        return self._end(mine)

    def _failure(self, message: str, label: str = "error", exit_code: int = 1) -> Failure:
        return Failure(self._rank, self._node, label, message, exit_code)

    def _next(self) -> str:
        found, _ = newest_checkpoint(self._run_dir / "checkpoints")
        return f"start again to resume from {found}" if found else "there is no checkpoint yet, start again"

    def _end(self, mine: Failure) -> int:
        """Publish ``mine`` unless another failure came first, print what this node hasn't said, wait for readers."""
        first = mine
        try:
            if self._world > 1:
                first = Failure(**json.loads(self._store.compare_set(_KEY, "", json.dumps(asdict(mine)))))
                self._store.add(_SEEN, 1)
        except RuntimeError:  # the store went down with the rank that held it
            pass
        if first == mine or (first.node != self._node and self._speaks):
            where = f"rank {first.rank}: " if self._world > 1 else ""
            with contextlib.suppress(OSError):  # the log may be on the disk that is full
                print(f"{first.label}: {where}{first.message}", file=sys.stderr, flush=True)
        if self._rank == 0 and self._world > 1:
            self._linger()
        return first.exit_code

    def _linger(self) -> None:
        """Stay until every rank has read the reason: without torchrun the store lives in this process."""
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
                self._leave(f"stopped by SIGTERM, as a scheduler does, or torchrun when a rank ends; {self._next()}")
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
