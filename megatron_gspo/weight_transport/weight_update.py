"""Weight updates of servers: pause, send bucket by bucket, flush the cache, set the version, resume.

How the bytes travel is a `WeightTransport`. The steps around it are here, so that a server either serves the complete
new version or serves nothing:

1. the server stops generating (running requests return what they have, "abort") and gets a weight version that no
   client accepts;
2. the weights arrive;
3. its prefix cache is flushed, it gets the new version, reports it when asked, and generates again.

A server that fails keeps the version that no client accepts until an update succeeds. It is resumed if it responds: a
paused server does not answer health checks either and would be taken for one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import EventLoop, ServerClient, ServerError
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport, TensorTransport
from megatron_gspo.weight_transport.transport import WeightTransport

TRANSPORTS = ("disk", "tensor", "distributed", "ipc")
_ABANDON_SECONDS = 2.0  # timeout of further requests to a server that did not respond


def update_servers(
    loop: EventLoop,
    servers: Sequence[ServerClient],
    named_tensors: Iterable[tuple[str, Tensor]],
    transport: WeightTransport,
    *,
    version: str,
    bucket_bytes: int,
    timeout: float,
) -> dict[str, str]:
    """Update all `servers` from a stream of (Hugging Face name, full tensor) to weight version `version`.

    Called on one rank, from any thread but the loop's. The stream is always read to its end, since producing it may be
    collective. Memory: one buffer of `bucket_bytes` bytes and what the transport adds. timeout: seconds of each step
    of a server: to pause, to load one bucket, to load from disk.

    Returns url -> one line, naming server and endpoint, for each server that failed. It may be half updated, and what
    it generates has no valid version until an update succeeds. The others have the new weights. Raises ValueError for a
    repeated name, DiskError if weights can't be written.
    """
    stream = iter(named_tensors)
    update = _Update(loop, servers, transport, version, timeout)
    try:
        update.run(stream, bucket_bytes)
    except Exception:
        update.abandon()
        raise
    finally:
        for _ in stream:
            pass
    return update.failures


class _Update:
    """One update. `active`: servers that have not failed; `failures`: url -> reason."""

    def __init__(self, loop: EventLoop, servers: Sequence[ServerClient], transport: WeightTransport, version: str,
                 timeout: float) -> None:  # fmt: skip
        self._loop, self._transport, self._version, self._timeout = loop, transport, version, timeout
        self._endpoints = transport.endpoints
        self.active = {server.url: server for server in servers}
        self.infos: dict[str, ServerInfo] = {}
        self.failures: dict[str, str] = {}

    def run(self, stream: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> None:
        """All steps. If the transport stores the weights, servers are paused when all are stored."""
        transport = self._transport
        if not transport.stores:
            self._on_each(self._begin)
        if not self.active:
            return
        transport.begin(self._version)
        for bucket in buckets(stream, bucket_bytes, device=transport.device, allocate=transport.allocate):
            if bucket.data.is_cuda:
                torch.cuda.current_stream(bucket.data.device).synchronize()  # other threads and processes read it
            transport.take(bucket)
            if not transport.stores:
                self._on_each(lambda server, bucket=bucket: transport.send(server, bucket, self._timeout))
            if not self.active:
                return
        transport.end()
        if transport.stores:
            self._on_each(self._begin)
        self._on_each(self._finish)

    def abandon(self) -> None:
        """Fail every active server; it keeps the version that no client accepts."""
        for url in self.active:
            self.failures[url] = f"server {url}: the weight update was cancelled"
        self.active, left = {}, self.active
        self._loop.run(_run_all(self._abandon(server) for server in left.values()))

    def _on_each(self, step: Callable[[ServerClient], Awaitable[Any]]) -> None:
        """One step of all active servers concurrently; those that fail are no longer active."""
        self._loop.run(_run_all(self._guarded(step, server) for server in self.active.values()))
        self.active = {url: server for url, server in self.active.items() if url not in self.failures}

    async def _guarded(self, step: Callable[[ServerClient], Awaitable[Any]], server: ServerClient) -> None:
        try:
            await step(server)
        except ServerError as error:
            self.failures[server.url] = first_line(error)
            await self._abandon(server, _ABANDON_SECONDS if error.status is None else self._timeout)

    async def _begin(self, server: ServerClient) -> None:
        """Pause the server and open the transport."""
        timeout, endpoints = self._timeout, self._endpoints
        info = await endpoints.server_info(server, timeout=timeout)
        reason = self._transport.unsupported(info)
        if reason:
            raise ServerError(f"server {server.url}: {reason}", retry=False)
        self.infos[server.url] = info
        await endpoints.pause(server, timeout=timeout)
        await endpoints.set_version(server, f"{self._version}:incomplete", timeout=timeout)
        if self._has_session(info):
            await endpoints.begin_update(server, timeout=timeout)
        await self._transport.open(server, info, timeout)

    async def _finish(self, server: ServerClient) -> None:
        """Make the server serve its new weights."""
        timeout, endpoints = self._timeout, self._endpoints
        await self._transport.finish(server, timeout)
        if self._has_session(self.infos[server.url]):
            await endpoints.end_update(server, timeout=timeout)
        await endpoints.flush_cache(server, timeout=timeout)
        await endpoints.set_version(server, self._version, timeout=timeout)
        reported = await endpoints.weight_version(server, timeout=timeout)
        if reported != self._version:
            raise ServerError(f"server {server.url}: weight version {reported[:80]!r} after the update to "
                              f"{self._version!r}; does another process update it?", retry=False)  # fmt: skip
        await endpoints.resume(server, timeout=timeout)
        self._transport.completed(server, self._version)

    async def _abandon(self, server: ServerClient, timeout: float = _ABANDON_SECONDS) -> None:
        """Free what a failed server holds for this update, as far as it still responds."""
        timeout = min(timeout, self._timeout)
        info = self.infos.get(server.url)
        await self._transport.abandon(server, timeout)
        if info is None:
            return  # it was not changed
        steps = [self._endpoints.end_update] if self._has_session(info) else []
        for step in (*steps, self._endpoints.resume):
            try:
                await step(server, timeout=timeout)
            except ServerError as error:
                if error.status is None:
                    return  # it died or hangs: no further requests

    def _has_session(self, info: ServerInfo) -> bool:
        return info.update_session and self._transport.needs_session


def make_transport(
    config: ServerConfig,
    endpoints: WeightEndpoints,
    *,
    run_dir: str | Path | None = None,
    source: str | Path | None = None,
    backend: str | None = None,
) -> WeightTransport:
    """The transport of `config.weight_transport`.

    run_dir: "disk" writes to `run_dir`/weights if `config.weight_dir` is not set. Servers must read the directory under
    the same path, and no other run may use it. source: the Hugging Face directory whose config and tokenizer are
    copied. backend: "gloo" or "nccl"; None: by the server's device.

    Raises ValueError for an unknown name or a missing directory.
    """
    name, section = config.weight_transport, config.section
    if name == "disk":
        if config.weight_dir is None and run_dir is None:
            raise ValueError(f"{section}.weight_transport=disk: set {section}.weight_dir, which servers read "
                             "checkpoints from")  # fmt: skip
        directory = Path(config.weight_dir) if config.weight_dir else Path(str(run_dir)) / "weights"
        return DiskTransport(endpoints, directory, source=None if source is None else Path(source))
    if name == "tensor":
        return TensorTransport(endpoints)
    if name == "distributed":
        return DistributedTransport(endpoints, address=config.master_address, backend=backend)
    if name == "ipc":
        return SharedMemoryTransport(endpoints)
    raise ValueError(f"{section}.weight_transport={name}: choose one of {', '.join(TRANSPORTS)}")


async def _run_all(steps: Iterable[Awaitable[None]]) -> None:
    """Run all to their end, then raise the first exception."""
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
