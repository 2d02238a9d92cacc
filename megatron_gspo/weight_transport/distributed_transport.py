"""Weights by broadcast: /init_weights_update_group and /update_weights_from_distributed."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine
from typing import Any

import torch

from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import Server, ServerError
from megatron_gspo.servers.server_info import Capabilities
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.tensor_payload import FORMAT
from megatron_gspo.weight_transport.transport import Route, accepted
from megatron_gspo.weight_transport.update_group import GroupError, UpdateGroup, default_backend

_INIT, _UPDATE, _DESTROY = ("/init_weights_update_group", "/update_weights_from_distributed",
                            "/destroy_weights_update_group")  # fmt: skip


class DistributedRoute(Route):
    """A process group with every server, kept from one update to the next; a bucket is one broadcast of bytes.

    One group a server, not one of all: a server that dies or hangs within a broadcast then harms no other, whereas in a
    common group the survivors would wait for it as long as their own deadline says, half an hour, and NCCL's watchdog
    would end them. The price: this process sends the weights once for each server.

    Memory: the buffer; the server allocates a bucket of its own. NCCL: both sides need GPUs; else gloo, over TCP.
    """

    def __init__(self, *, address: str = "127.0.0.1", backend: str | None = None) -> None:
        self._address, self._backend = address, backend
        self._life, self._count = uuid.uuid4().hex[:8], itertools.count()
        self._groups: dict[str, UpdateGroup] = {}
        self._found: dict[str, Capabilities] = {}
        self._settled: dict[str, tuple[str, str]] = {}  # (life, version) of each server that an update has served

    def refuses(self, found: Capabilities) -> str:
        if found.pp_size > 1:
            return (f"has pp_size {found.pp_size}, and SGLang numbers the ranks of an update group without pipeline "
                    "stages; start it without, or use another sglang.weight_transport")  # fmt: skip
        return super().refuses(found)

    async def open(self, server: Server, found: Capabilities, timeout: float) -> None:
        """Keep the group of a server that is as the last update left it; make one with any other."""
        group = self._groups.get(server.url)
        self._found[server.url] = found
        if group is not None and (found.life, found.weight_version) == self._settled.pop(server.url, None):
            return
        if group is not None:
            await self.leave(server, timeout)
        backend = self._backend or default_backend(found.device)
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        name = f"weights-{self._life}-{next(self._count)}"
        try:
            group = UpdateGroup(name, 1 + found.tp_size, address=self._address, backend=backend, timeout=timeout)
        except GroupError as error:
            raise ServerError(f"server {server.url}{_INIT}: {error}", retry=False) from None
        body = {"master_address": self._address, "master_port": group.port, "rank_offset": 1,
                "world_size": group.size, "group_name": name, "backend": backend}  # fmt: skip
        self._groups[server.url] = group
        await _both(server, _INIT, accepted(server, _INIT, body, timeout), group.join(), timeout)

    async def send(self, server: Server, bucket: Bucket, timeout: float) -> None:
        group = self._groups[server.url]
        body: dict[str, Any] = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group.name, "load_format": FORMAT, "flush_cache": False,
        }  # fmt: skip
        request = accepted(server, _UPDATE, body, timeout)
        await _both(server, _UPDATE, request, group.broadcast(bucket.data), timeout)

    def settled(self, server: Server, version: str) -> None:
        self._settled[server.url] = (self._found[server.url].life, version)

    async def leave(self, server: Server, timeout: float) -> None:
        """The server may have died, or wait in a broadcast that this side has left: either way the group is gone."""
        group = self._groups.pop(server.url, None)
        self._settled.pop(server.url, None)
        if group is None:
            return
        group.drop()
        try:
            await server.post(_DESTROY, {"group_name": group.name}, timeout=timeout)
        except ServerError:
            pass

    def close(self) -> None:
        """Servers notice by the closed connections."""
        for group in self._groups.values():
            group.drop()
        self._groups.clear()


async def _both(server: Server, path: str, request: Coroutine[Any, Any, Any], ours: Coroutine[Any, Any, None],
                timeout: float) -> None:  # fmt: skip
    """The server's part and ours, which wait for each other: as soon as one fails the other is given up.

    Raises `ServerError`: the server's own words where it has said something, else what our side met.
    """
    tasks = [asyncio.create_task(request), asyncio.create_task(ours)]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if tasks[1].done() and tasks[1].exception() is not None and not tasks[0].done():
            await asyncio.wait(tasks[:1], timeout=1.0)  # a server that fails has more to say than a broken connection
        for task in tasks:
            if task.done() and isinstance(task.exception(), ServerError):
                raise task.exception()
            if task.done() and isinstance(task.exception(), GroupError):
                raise ServerError(f"server {server.url}{path}: {first_line(task.exception())}", retry=True)
            if task.done():
                task.result()
        if not all(task.done() for task in tasks):
            raise ServerError(f"server {server.url}{path}: no answer within {timeout:.0f} s", retry=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
