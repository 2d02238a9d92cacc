"""A process group of this process and the ranks of servers, outside of torch.distributed's
registry.

The other side is SGLang's /init_weights_update_group, which joins with `init_custom_process_group`:
a TCPStore at an address and port, prefixed with the group's name; then `_new_process_group_helper`,
which prefixes it again with name and device. Building the same prefixes around public classes keeps
the group out of torch.distributed's global registry, gives it deadlines of its own, and lets it be
dropped when its server dies.
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
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
# The device whose prefix torch gives the backend's store.
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_POLL = 0.002  # seconds between two checks of a broadcast
_SLACK = 5.0  # the backend's own timeout comes later than ours, whose message is better


class GroupError(RuntimeError):
    """A group that couldn't be made or a broadcast that failed; one line."""


class UpdateGroup:
    """Rank 0 is this process, the tensor-parallel ranks of the servers follow. Made in two steps,
    since all connect at the same time: the constructor listens, so that `port` is known; `join`
    connects."""

    def __init__(
        self,
        name: str,
        size: int,
        *,
        address: str,
        backend: str,
        timeout: float,
        in_flight: int = 1,
    ) -> None:
        """Open the store of the group.

        Args:
            address: this machine's, as the servers reach it; the store listens there and nowhere
                else.
            in_flight: broadcasts at the same time.

        Raises:
            GroupError: it can't listen there.
        """
        self.name = name
        self.size = size
        self.address = address
        self.backend = backend
        self._timeout = timedelta(seconds=timeout + _SLACK)
        self._in_flight = in_flight
        self._group: Any = None
        self._works: list[Any] = []
        try:
            family, socket_type, protocol, _, socket_address = socket.getaddrinfo(
                address, 0, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, socket_type, protocol)
            listener.bind(socket_address)
            listener.listen()
        except OSError as error:
            raise GroupError(
                f"master_address={address}: cannot listen there ({error.strerror or error}); "
                "give an address of this machine"
            ) from None
        self.port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            address,
            self.port,
            size,
            True,
            self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    async def join(self) -> None:
        """Connect to the servers' ranks, which must be joining. Raises GroupError."""
        try:
            self._group = await in_thread(self._connect)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"no process group with it: {_short(error)}") from None

    def _connect(self) -> Any:
        # a client, so that this ends when `drop` ends the store
        client = dist.TCPStore(
            self.address, self.port, None, False, self._timeout, wait_for_workers=False
        )
        store = dist.PrefixStore(self.name, client)
        store = dist.PrefixStore(f"{self.name}/", store)
        store = dist.PrefixStore(f"{_DEVICES[self.backend]}/", store)
        if self.backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = self._timeout
            gloo._threads = max(self._in_flight, 2)
            gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
            return dist.ProcessGroupGloo(store, 0, self.size, gloo)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, 0, self.size, options)

    async def broadcast(self, data: Tensor) -> None:
        """Send [bytes] uint8 to the servers' ranks. If it is cancelled, the group must be dropped.

        Raises GroupError.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        options.asyncOp = True
        work = None
        try:
            work = self._group.broadcast([data], options)
            self._works.append(work)
            while not work.is_completed():
                await asyncio.sleep(_POLL)
            self._works.remove(work)
            work.wait()
            return
        except RuntimeError as error:
            reason = _short(error)
        finally:
            work = None  # it keeps the connections open, and an error's traceback keeps this frame
        raise GroupError(f"the broadcast broke: {reason}")

    def put(self, key: str, value: str) -> None:
        """Write to the group's store, for the receivers of the servers."""
        self._transfers().set(key, value)

    def has(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._transfers().check(keys)

    def get(self, key: str) -> str:
        """A value that is there."""
        return self._transfers().get(key).decode()

    def remove(self, key: str) -> None:
        """Remove a key that is not read again."""
        self._transfers().delete_key(key)

    def _transfers(self) -> dist.PrefixStore:
        assert self._store is not None, "the group was dropped"
        return dist.PrefixStore(f"{self.name}/transfers", self._store)

    def drop(self) -> None:
        """Drop the group without waiting for the servers; in the background if an operation is
        running.
        """
        group = self._group
        works = self._works
        self._group = None
        self._works = []
        self._store = None
        if group is not None:
            threading.Thread(target=_release, args=([group], works), daemon=True).start()


def _release(held: list[Any], works: list[Any]) -> None:
    """End a group: torch waits in its destructor for running operations, so these have to end
    before.
    """
    if works:
        held[0].abort()
    while any(not work.is_completed() for work in works):
        time.sleep(0.05)
    works.clear()
    held.clear()


def local_address(url: str) -> str:
    """This machine's address on the route to a server."""
    parts = urlsplit(url)
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(socket_address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"no route to it ({error.strerror or error})") from None


async def in_thread(function: Callable[[], T]) -> T:
    """The function's result, from a daemon thread: unlike an executor's, one that hangs doesn't
    keep the program.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(finish: Callable[[], None]) -> None:
        if not future.done():
            finish()

    def run() -> None:
        try:
            finish = functools.partial(future.set_result, function())
        except Exception as error:  # raised where the result is awaited
            finish = functools.partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, finish)

    threading.Thread(target=run, daemon=True).start()
    return await future


def default_backend(device: str) -> str:
    """The backend for a server on `device`: NCCL needs a GPU on both sides."""
    return "nccl" if device == "cuda" and torch.cuda.is_available() else "gloo"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
