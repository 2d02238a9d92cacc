"""A process group of this process and one server's ranks, outside of torch.distributed's registry.

The other side is SGLang's /init_weights_update_group, which joins with `init_custom_process_group`: a TCPStore at an
address and port, prefixed with the group's name; then `_new_process_group_helper`, which prefixes it once more with
name and device. Building the same prefixes around public classes keeps the group out of torch.distributed's global
registry, gives it deadlines of its own, and lets it be dropped when its server dies.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # the device whose prefix torch gives the backend's store
_POLL = 0.002  # seconds between two checks of a broadcast
_SLACK = 5.0  # the backend's own timeout comes later than ours, whose message is better


class GroupError(RuntimeError):
    """A group that couldn't be made or a broadcast that failed; one line."""


class UpdateGroup:
    """Rank 0 is this process, the server's tensor-parallel ranks follow. Made in two steps, since both sides connect
    at the same time: the constructor listens, so that `port` is known; `join` connects."""

    def __init__(self, name: str, size: int, *, address: str, backend: str, timeout: float) -> None:
        """address: this machine's, as the server reaches it; the store listens there and nowhere else.

        Raises GroupError if it can't listen there.
        """
        self.name, self.size, self.address, self.backend = name, size, address, backend
        self._timeout = timedelta(seconds=timeout + _SLACK)
        self._group: Any = None
        self._work: Any = None
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.bind(place)
            listener.listen()
        except OSError as error:
            raise GroupError(f"master_address={address}: cannot listen there ({error.strerror or error}); "
                             "give an address of this machine") from None  # fmt: skip
        self.port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            address, self.port, size, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    async def join(self) -> None:
        """Connect to the server's ranks, which must be joining. Raises GroupError."""
        try:
            self._group = await _in_thread(self._connect)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"no process group with it: {_short(error)}") from None

    def _connect(self) -> Any:
        assert self._store is not None
        store = dist.PrefixStore(self.name, self._store)
        store = dist.PrefixStore(f"{self.name}/", store)
        store = dist.PrefixStore(f"{_DEVICES[self.backend]}/", store)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, self.size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, 0, self.size, options)

    async def broadcast(self, data: Tensor) -> None:
        """Send [bytes] uint8 to the server's ranks. If it is cancelled, the group must be dropped.

        Raises GroupError.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout, options.asyncOp = 0, 0, self._timeout, True
        try:
            self._work = self._group.broadcast([data], options)
            while not self._work.is_completed():
                await asyncio.sleep(_POLL)
            self._work.wait()
        except RuntimeError as error:
            raise GroupError(f"the broadcast broke: {_short(error)}") from None
        self._work = None

    def drop(self) -> None:
        """Drop the group without waiting for the server; in the background if an operation is running."""
        group, work, store = self._group, self._work, self._store
        self._group = self._work = self._store = None
        if group is not None:
            threading.Thread(target=_release, args=([group, work, store],), daemon=True).start()


def _release(held: list[Any]) -> None:
    """End a group: torch waits in its destructor for what is under way, so that has to have ended before."""
    group, work = held[0], held[1]
    nccl: Any = getattr(dist, "ProcessGroupNCCL", ())
    if work is not None and hasattr(group, "abort") and isinstance(group, nccl):
        group.abort()
    while work is not None and not work.is_completed():
        time.sleep(0.05)
    del group, work
    held.clear()


async def _in_thread(function: Callable[[], T]) -> T:
    """The function's result, from a daemon thread: unlike an executor's, one that hangs doesn't keep the program."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(finish: Callable[[], None]) -> None:
        if not future.done():
            finish()

    def run() -> None:
        try:
            finish = functools.partial(future.set_result, function())
        except Exception as error:
            finish = functools.partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, finish)

    threading.Thread(target=run, daemon=True).start()
    return await future


def default_backend(device: str) -> str:
    """Of a server on `device`: NCCL needs a GPU on both sides."""
    return "nccl" if device == "cuda" and torch.cuda.is_available() else "gloo"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
