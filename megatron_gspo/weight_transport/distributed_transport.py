"""Weights by broadcast in a process group of one source and all servers."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

import torch

from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.buckets import Bucket, Entry
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from megatron_gspo.weight_transport.update_group import (
    GroupError,
    UpdateGroup,
    default_backend,
    local_address,
)

# A server whose group broke may take so long to leave it; one that takes longer has failed.
PROBE_SECONDS = 10.0
_IN_FLIGHT = 4


class DistributedTransport(WeightTransport):
    """One process group with all servers, kept between updates; a bucket is one broadcast to all of
    them.

    Several buckets are in flight, so that a server passes one on while the next is sent: gloo's
    broadcast is a tree. A server gets the requests of its buckets one after the other. One that
    answers with an error goes on receiving, so that the others finish. One that dies or hangs
    breaks the group: the source leaves it, the servers that answer then are `Sent.again`, and their
    next group is without it.

    Memory: the buffers; a server allocates a bucket of its own. NCCL if both sides have GPUs, else
    gloo over TCP.
    """

    in_flight = _IN_FLIGHT

    def __init__(
        self,
        endpoints: WeightEndpoints,
        *,
        address: str | None = None,
        checksums: bool = False,
    ) -> None:
        """address: this machine's, as the servers reach it; None: that of the route to the
        first server.
        """
        super().__init__(endpoints, checksums=checksums)
        self._address = address
        # The event loop's thread has GPU 0.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._run_id = uuid.uuid4().hex[:8]
        self._group_numbers = itertools.count()
        self._group: UpdateGroup | None = None
        self._members: dict[str, str] = {}  # start_id of each server of the group
        self._version = ""  # of this transfer
        self._completed = ""  # version of the last transfer that all of its servers took
        self._requests: dict[str, asyncio.Task[None]] = {}  # the last one of each server
        self._broadcasts: deque[asyncio.Task[None]] = deque()
        self._joined = False
        self._broken = ""  # why the group is
        self._stop = asyncio.Event()  # set where it is

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: pipeline-parallel servers."""
        if info.pp_size > 1:
            return (
                f"has pp_size {info.pp_size}, and a process group reaches no pipeline stages; "
                "start it without, or use another weight_transport"
            )
        return super().unsupported(info)

    def begin(self, version: str, source_number: int) -> None:
        """See `WeightTransport.begin`."""
        self._version = version

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        """Keep the group if its servers are unchanged since the last update; else make a new
        one.
        """
        self._start(targets)
        if not targets or self._is_current(targets):
            return
        await self._leave(PROBE_SECONDS)
        try:
            await self._join(timeout)
        except GroupError as error:
            path = self.endpoints.init_group_path
            self.failures = {
                url: ServerError(f"server {url}{path}: {error}", retry=False) for url in targets
            }
            self.targets = {}

    def _start(self, targets: Mapping[str, Target]) -> None:
        self.targets = dict(targets)
        self.failures = {}
        self._requests = {}
        self._broadcasts = deque()
        self._broken = ""
        self._stop = asyncio.Event()

    def _is_current(self, targets: Mapping[str, Target]) -> bool:
        """Whether the group is that of these servers, and their weights have not changed since
        the last update.
        """
        members = {url: target.info.start_id for url, target in targets.items()}
        unchanged = all(
            target.info.weight_version == self._completed for target in targets.values()
        )
        return self._group is not None and members == self._members and unchanged

    def _new_group(self, infos: list[ServerInfo], timeout: float) -> UpdateGroup:
        backend = default_backend(infos[0].device)
        if backend == "nccl":
            self.device = torch.device("cuda", self._gpu)
        name = f"weights-{self._run_id}-{next(self._group_numbers)}"
        address = self._address or local_address(infos[0].url)
        size = 1 + sum(info.tp_size for info in infos)
        return UpdateGroup(
            name, size, address=address, backend=backend, timeout=timeout, in_flight=self.in_flight
        )

    async def _join(self, timeout: float) -> None:
        """Make the group; a server that does not join breaks it."""
        group = self._new_group([target.info for target in self.targets.values()], timeout)
        self._group = group
        self._members = {url: target.info.start_id for url, target in self.targets.items()}
        first = 1
        for url, target in self.targets.items():
            request = self.endpoints.init_group(target.client, group, first, timeout=timeout)
            self._requests[url] = asyncio.create_task(self._guarded(url, request))
            first += target.info.tp_size
        self._broadcasts.append(asyncio.create_task(group.join()))
        await self._settle(timeout)
        self._joined = not self._broken

    @property
    def is_over(self) -> bool:
        """See `WeightTransport.is_over`."""
        return bool(self._broken) or not self.targets

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        if self.is_over or self._group is None:
            return
        for url, target in self.targets.items():
            previous = self._requests.get(url)
            load = self._load(target, self._group.name, bucket.entries, previous, timeout)
            self._requests[url] = asyncio.create_task(load)
        self._broadcasts.append(asyncio.create_task(self._group.broadcast(bucket.data)))
        await self._wait(timeout, self.in_flight - 1)

    async def flush(self, timeout: float) -> None:
        """See `WeightTransport.flush`."""
        await self._wait(timeout, 0)

    async def finish(self, timeout: float) -> Sent:
        """See `WeightTransport.finish`."""
        if not self._broken:
            await self._settle(timeout)
        if not self._broken:
            self._completed = "" if self.failures else self._version
            return Sent(self.failures)
        return await self._break_up()

    async def abort(self) -> None:
        """See `WeightTransport.abort`."""
        await self._cancel()
        await self._leave(PROBE_SECONDS)

    def close(self) -> None:
        """Drop the group; the servers detect the closed connections."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self._joined = False

    async def _load(
        self,
        target: Target,
        group: str,
        entries: tuple[Entry, ...],
        previous: asyncio.Task[None] | None,
        timeout: float,
    ) -> None:
        """A server's request for one bucket, after the previous one."""
        if previous is not None:
            await asyncio.wait([previous])
        if not self._broken:
            request = self.endpoints.load_broadcast(target.client, group, entries, timeout=timeout)
            await self._guarded(target.info.url, request)

    async def _guarded(self, url: str, request: Coroutine[Any, Any, None]) -> None:
        """A request; its failure is the server's, and without an answer the group's."""
        try:
            await request
        except ServerError as error:
            if not self._broken:
                self.failures[url] = error
            if error.status is None or not self._joined:
                self._break(f"server {url} has failed")

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._stop.set()

    async def _wait(self, timeout: float, most: int) -> None:
        """Wait until at most so many broadcasts are in flight, or the group is broken."""
        while len(self._broadcasts) > most and not self._broken:
            await self._until(self._broadcasts[0], timeout)
            if self._broadcasts[0].done():
                self._broadcasts.popleft()

    async def _until(self, task: asyncio.Task[None], timeout: float) -> None:
        """Wait for a task, until the group is broken; longer than the timeout breaks it."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stop], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            self._break(f"no answer within {timeout:.0f} s")
        elif error := task.exception():
            if not isinstance(error, GroupError):
                raise error
            self._break(str(error))

    async def _settle(self, timeout: float) -> None:
        """Wait for all broadcasts and requests, or until the group is broken."""
        await self._wait(timeout, 0)
        for request in self._requests.values():
            if not self._broken:
                # Each request has a timeout of its own.
                await self._until(request, _IN_FLIGHT * timeout)

    async def _break_up(self) -> Sent:
        """Leave the broken group.

        The servers that leave it too can be updated again; the others have failed.
        """
        path = self.endpoints.broadcast_path if self._joined else self.endpoints.init_group_path
        refused: set[str] = set()  # servers that answered that they do not join
        if not self._joined:
            refused = {url for url, error in self.failures.items() if error.status is not None}
        await self._cancel()
        reachable = await self._leave(PROBE_SECONDS)
        failures: dict[str, ServerError] = {}
        for url in self.targets:
            if url in reachable and url not in refused:
                continue
            broken = ServerError(f"server {url}{path}: {self._broken}", retry=True)
            failures[url] = self.failures.get(url, broken)
        return Sent(failures, tuple(url for url in self.targets if url not in failures))

    async def _cancel(self) -> None:
        """End running broadcasts and requests."""
        tasks = [*self._requests.values(), *self._broadcasts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, timeout: float) -> set[str]:
        """Drop the group, here and at its servers. URLs of those that answer."""
        group = self._group
        members = self._members
        self._group = None
        self._members = {}
        self._completed = ""
        self._joined = False
        if group is None:
            return set()
        group.drop()

        async def leave(target: Target) -> bool:
            try:
                await self.endpoints.destroy_group(target.client, group.name, timeout=timeout)
            except ServerError as error:
                return error.status is not None  # it had not joined
            return True

        urls = [url for url in self.targets if url in members]
        answered = await asyncio.gather(*(leave(self.targets[url]) for url in urls))
        return {url for url, answer in zip(urls, answered, strict=True) if answer}
