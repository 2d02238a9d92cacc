"""Weights by broadcast in a process group with each server."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine
from typing import Any

import torch

from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import ServerClient, ServerError
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import WeightTransport
from megatron_gspo.weight_transport.update_group import GroupError, UpdateGroup, default_backend


class DistributedTransport(WeightTransport):
    """A process group with every server, kept between updates; a bucket is one broadcast of bytes.

    There is one group per server instead of one for all. A server that dies or hangs during a broadcast then affects no
    other; in a common group the others would wait for it until their own timeout of half an hour, and NCCL's watchdog
    would end them. The cost: this process sends the weights once per server.

    Memory: the buffer; the server allocates a bucket of its own. NCCL if both sides have GPUs, else gloo over TCP.
    """

    def __init__(
        self, endpoints: WeightEndpoints, *, address: str = "127.0.0.1", backend: str | None = None
    ) -> None:
        super().__init__(endpoints)
        self._address, self._backend = address, backend
        self._run_id, self._group_numbers = uuid.uuid4().hex[:8], itertools.count()
        self._groups: dict[str, UpdateGroup] = {}
        self._infos: dict[str, ServerInfo] = {}
        self._completed: dict[str, tuple[str, str]] = {}  # (start_id, version) of each updated server

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: pipeline-parallel servers."""
        if info.pp_size > 1:
            return (f"has pp_size {info.pp_size}, and a process group reaches no pipeline stages; "
                    "start it without, or use another weight_transport")  # fmt: skip
        return super().unsupported(info)

    async def open(self, server: ServerClient, info: ServerInfo, timeout: float) -> None:
        """Keep the group if the server is unchanged since the last update; else make a new one."""
        group = self._groups.get(server.url)
        self._infos[server.url] = info
        if group is not None and (info.start_id, info.weight_version) == self._completed.pop(server.url, None):
            return
        if group is not None:
            await self.abandon(server, timeout)
        backend = self._backend or default_backend(info.device)
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        name, path = f"weights-{self._run_id}-{next(self._group_numbers)}", self.endpoints.init_group_path
        try:
            group = UpdateGroup(name, 1 + info.tp_size, address=self._address, backend=backend, timeout=timeout)
        except GroupError as error:
            raise ServerError(f"server {server.url}{path}: {error}", retry=False) from None
        self._groups[server.url] = group
        request = self.endpoints.init_group(server, group, timeout=timeout)
        await _run_both(server, path, request, group.join(), timeout)

    async def send(self, server: ServerClient, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        group = self._groups[server.url]
        request = self.endpoints.load_broadcast(server, group.name, bucket.entries, timeout=timeout)
        await _run_both(server, self.endpoints.broadcast_path, request, group.broadcast(bucket.data), timeout)

    def completed(self, server: ServerClient, version: str) -> None:
        """See `WeightTransport.completed`."""
        self._completed[server.url] = (self._infos[server.url].start_id, version)

    async def abandon(self, server: ServerClient, timeout: float) -> None:
        """Drop the group: the server may have died, or wait in a broadcast that this side has left."""
        group = self._groups.pop(server.url, None)
        self._completed.pop(server.url, None)
        if group is None:
            return
        group.drop()
        try:
            await self.endpoints.destroy_group(server, group.name, timeout=timeout)
        except ServerError:
            pass

    def close(self) -> None:
        """Drop all groups; the servers notice the closed connections."""
        for group in self._groups.values():
            group.drop()
        self._groups.clear()


async def _run_both(server: ServerClient, path: str, request: Coroutine[Any, Any, Any], ours: Coroutine[Any, Any, None],
                    timeout: float) -> None:  # fmt: skip
    """Run the server's part and ours, which wait for each other; when one fails the other is cancelled.

    Raises `ServerError`: the server's error if it reported one, else ours.
    """
    tasks = [asyncio.create_task(request), asyncio.create_task(ours)]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if tasks[1].done() and tasks[1].exception() is not None and not tasks[0].done():
            await asyncio.wait(tasks[:1], timeout=1.0)  # a server's own error says more than a broken connection
        for task in tasks:
            error = task.exception() if task.done() else None
            if isinstance(error, ServerError):
                raise error
            if isinstance(error, GroupError):
                raise ServerError(f"server {server.url}{path}: {first_line(error)}", retry=True)
            if task.done():
                task.result()
        if not all(task.done() for task in tasks):
            raise ServerError(f"server {server.url}{path}: no answer within {timeout:.0f} s", retry=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
