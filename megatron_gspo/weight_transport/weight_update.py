"""Weight updates of servers: pause, send bucket by bucket, flush the cache, set the version,
resume.

How the bytes travel is a `WeightTransport`. The steps around it are here, so that a server either
serves the complete new version or serves nothing:

1. the server stops generating (running requests return what they have, "abort") and gets a weight
   version that no client accepts;
2. every source sends its tensors (`WeightTransport.transfer`), all at once or one after the other;
3. the server's prefix cache is flushed, it gets the new version, reports it on request, and
    generates again.

A server that fails keeps the version that no client accepts until an update succeeds. It is resumed
if it responds: a paused server does not answer health checks either and would be taken for one that
hangs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.config import ServerConfig
from megatron_gspo.models.peft_files import AdapterFacts
from megatron_gspo.servers.http_client import EventLoop, JsonObject, ServerClient, ServerError
from megatron_gspo.weight_transport.adapter_transport import (
    AdapterFileTransport,
    AdapterTensorTransport,
)
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.distributed_transport import PROBE_SECONDS, DistributedTransport
from megatron_gspo.weight_transport.receiver_transport import (
    Offer,
    ReceiverTransport,
    abort_transfer,
    receive_requests,
)
from megatron_gspo.weight_transport.server_endpoints import (
    ClearedWeights,
    ServerInfo,
    WeightEndpoints,
)
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport, TensorTransport
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport

TRANSPORTS = ("disk", "tensor", "distributed", "ipc")
_ATTEMPTS = 3  # of one source's transfer, whose group may break with each server that fails
_TRANSFER_SECONDS = 86_400.0  # a receiver has a timeout for each bucket
_ABANDON_SECONDS = 2.0  # timeout of further requests to a server that did not respond


@dataclass(frozen=True)
class UpdatePlan:
    """What every source of an update needs."""

    version: str
    all_sources_at_once: bool
    """Whether all sources send at the same time; else they send one after the other."""

    with_offers: bool = False
    """Whether each transfer begins with `ReceiverTransport.offer` and `ServerUpdate.receive`."""


class ServerUpdate:
    """The steps of an update around the transfers of its sources, on one rank.

    Attributes:
        pending: servers of the current transfer, by URL.
        failures: URL -> reason. Such a server may be half updated, and what it generates has no
            valid version until an update succeeds.
        cleared: URL -> the parameters that the server was asked to prove, with a transport's
            `checksums`.
    """

    def __init__(
        self,
        loop: EventLoop,
        servers: Sequence[ServerClient],
        transport: WeightTransport,
        *,
        version: str,
        timeout: float,
    ) -> None:
        """timeout: seconds of each step of a server: to pause, to load from disk."""
        self._loop = loop
        self._transport = transport
        self._version = version
        self._timeout = timeout
        self._servers = servers
        self._endpoints = transport.endpoints
        self._active = {server.url: server for server in servers}
        self._infos: dict[str, ServerInfo] = {}
        self._receiving: dict[str, Future[None]] = {}
        self._attempts = 0  # of the transfer
        self.pending: dict[str, Target] = {}
        self.failures: dict[str, ServerError] = {}
        self.cleared: dict[str, ClearedWeights] = {}

    def begin(self) -> None:
        """Pause the servers; if the transport stores the weights, they are paused when all are
        stored.
        """
        if not self._active:
            return
        self._transport.prepare(self._version)
        if not self._transport.stores:
            self._on_each(self._pause)

    @property
    def plan(self) -> UpdatePlan:
        """What every source needs."""
        infos = [self._infos[url] for url in self._active if url in self._infos]
        return UpdatePlan(
            version=self._version,
            all_sources_at_once=self._transport.takes_all_sources(infos),
            with_offers=isinstance(self._transport, ReceiverTransport),
        )

    def next_transfer(self) -> list[ServerInfo] | None:
        """The servers that a transfer is to send to, which are then `pending`; None when it is
        complete. Their order, which gives the ranks of process groups, is the constructor's.

        Called before each attempt; the first call after a complete transfer begins the next.
        """
        is_complete = self._attempts > 0 and not self.pending
        if is_complete or not self._active:
            self._attempts = 0
            return None
        if not self._attempts:
            self.pending = {
                url: Target(server, self._infos[url])
                for url, server in self._active.items()
                if url in self._infos
            }
        self._attempts += 1
        return [target.info for target in self.pending.values()]

    def receive(self, offers: Sequence[Offer], transfer: str) -> None:
        """Let the pending servers receive from the sources of these offers, until `record`."""
        assert isinstance(self._transport, ReceiverTransport)
        infos = [target.info for target in self.pending.values()]
        requests = receive_requests(
            list(offers),
            transfer,
            infos,
            timeout=self._timeout,
            checksums=self._transport.checksums,
        )

        async def receive(target: Target) -> None:
            try:
                await self._endpoints.receive(
                    target.client, requests[target.info.url], timeout=_TRANSFER_SECONDS
                )
            except ServerError:
                for offer in offers:
                    threading.Thread(
                        target=abort_transfer, args=(offer, transfer), daemon=True
                    ).start()
                raise

        self._receiving = {
            url: self._loop.spawn(receive(target)) for url, target in self.pending.items()
        }

    def _end_receiving(self, seconds: float) -> dict[str, ServerError]:
        """The servers that have failed to answer within so many seconds, or with an error."""
        deadline = time.monotonic() + seconds
        failures = dict[str, ServerError]()
        for url, receiving in self._receiving.items():
            try:
                receiving.result(max(deadline - time.monotonic(), 0.0))
            except ServerError as error:
                failures[url] = error
            except TimeoutError:
                receiving.cancel()
                reason = f"server {url}: no answer within {self._timeout:g} s"
                failures[url] = ServerError(reason, retry=True)
        self._receiving = {}
        return failures

    def record(self, results: Sequence[Sent]) -> None:
        """What the sources of an attempt report.

        Servers that lack tensors of one are `pending` again.
        """
        failures: dict[str, ServerError] = {}
        again: set[str] = set()
        for sent in results:
            failures |= sent.failures
            again |= set(sent.again)
        failures |= self._end_receiving(PROBE_SECONDS if again else self._timeout)
        again -= failures.keys()
        if self._attempts >= _ATTEMPTS:
            failures |= {
                url: ServerError(
                    f"server {url}: its process group broke {_ATTEMPTS} times", retry=True
                )
                for url in again
            }
            again = set()
        self.pending = {url: target for url, target in self.pending.items() if url in again}
        self._fail(failures)

    def finish(self, *, num_sources: int) -> None:
        """Make the servers serve their new weights."""
        if not self._active:
            return
        self._transport.publish(num_sources)
        if self._transport.stores:
            self._on_each(self._pause)
        self._on_each(self._serve)

    def abandon(self) -> None:
        """Fail every active server; it keeps the version that no client accepts."""
        self._fail(
            {
                url: ServerError(f"server {url}: the weight update was cancelled", retry=True)
                for url in self._active
            }
        )

    def _on_each(self, step: Callable[[ServerClient], Awaitable[None]]) -> None:
        """One step of all active servers concurrently; those that fail are no longer active."""
        failures: dict[str, ServerError] = {}

        async def guarded(server: ServerClient) -> None:
            try:
                await step(server)
            except ServerError as error:
                failures[server.url] = error

        self._loop.run(_run_all(guarded(server) for server in self._active.values()))
        self._fail(failures)

    def _fail(self, failures: Mapping[str, ServerError]) -> None:
        failed = [self._active.pop(url) for url in failures if url in self._active]
        self.failures |= failures
        self._loop.run(_run_all(self._abandon(server, failures[server.url]) for server in failed))

    async def _pause(self, server: ServerClient) -> None:
        """Pause the server, whose weights are about to change."""
        timeout = self._timeout
        endpoints = self._endpoints
        info = await endpoints.server_info(server, timeout=timeout)
        reason = info.refusal or self._transport.unsupported(info)
        if reason:
            raise ServerError(f"server {server.url}: {reason}", retry=False)
        self._infos[server.url] = info
        await endpoints.pause(server, timeout=timeout)
        await endpoints.set_version(server, f"{self._version}:incomplete", timeout=timeout)
        if self._has_session(info):
            await endpoints.begin_update(server, timeout=timeout)
        if self._transport.checksums:
            self.cleared[server.url] = await endpoints.clear_weights(server, timeout=timeout)

    async def _serve(self, server: ServerClient) -> None:
        """Make the server serve its new weights."""
        timeout = self._timeout
        endpoints = self._endpoints
        await self._transport.load(server, timeout)
        if self._has_session(self._infos[server.url]):
            await endpoints.end_update(server, timeout=timeout)
        if cleared := self.cleared.get(server.url):
            if missed := await endpoints.unwritten(server, cleared, timeout=timeout):
                raise ServerError(
                    f"server {server.url}: the update did not write {len(missed)} of its"
                    f" parameters, the first: {missed[0][:120]}",
                    retry=False,
                )
        await endpoints.flush_cache(server, timeout=timeout)
        await endpoints.set_version(server, self._version, timeout=timeout)
        reported = await endpoints.weight_version(server, timeout=timeout) or ""
        if reported != self._version:
            raise ServerError(
                f"server {server.url}: weight version {reported[:80]!r} after the update to "
                f"{self._version!r}; does another process update it?",
                retry=False,
            )
        await endpoints.resume(server, timeout=timeout)

    async def _abandon(self, server: ServerClient, error: ServerError) -> None:
        """Free what a failed server holds for this update, as far as it still responds."""
        timeout = min(self._timeout, _ABANDON_SECONDS if error.status is None else self._timeout)
        info = self._infos.get(server.url)
        if info is None:
            return  # it was not changed
        steps = [self._endpoints.resume]
        if self._has_session(info):
            steps.insert(0, self._endpoints.end_update)
        for step in steps:
            try:
                await step(server, timeout=timeout)
            except ServerError as failure:
                if failure.status is None:
                    return  # it died or hangs: no further requests

    def _has_session(self, info: ServerInfo) -> bool:
        return info.update_session and self._transport.needs_session


def weight_directory(config: ServerConfig, run_dir: str | Path | None) -> Path:
    """Where "disk" writes: `run_dir`/weights if `config.weight_dir` is not set.

    Raises ValueError without either.
    """
    if config.weight_dir is None and run_dir is None:
        raise ValueError(
            f"{config.section}.weight_transport=disk: set {config.section}.weight_dir, which"
            " servers read checkpoints from"
        )
    return Path(config.weight_dir) if config.weight_dir else Path(str(run_dir)) / "weights"


def make_transport(
    config: ServerConfig,
    endpoints: WeightEndpoints,
    *,
    run_dir: str | Path | None = None,
    source: str | Path | None = None,
    address: str | None = None,
    quantization: JsonObject | None = None,
    adapters: AdapterFacts | None = None,
) -> WeightTransport:
    """The transport of `config.weight_transport`, for one source.

    Raises ValueError for an unknown name or a missing directory.

    Args:
        run_dir: see `weight_directory`. Servers must read the directory under the same path, and no
            other run may use it.
        source: the Hugging Face directory whose config and tokenizer are copied.
        address: this node's as the servers reach it; None: that of the route to them.
        quantization: the `quantization_config` of checkpoints of the weights.
        adapters: of adapters that are sent alone, "tensor" in requests and otherwise as a file.
    """
    name = config.weight_transport
    section = config.section
    checksums = config.weight_checksums
    if adapters is not None:
        if name == "tensor":
            return AdapterTensorTransport(endpoints, adapters)
        return AdapterFileTransport(endpoints, weight_directory(config, run_dir), adapters)
    if name == "disk":
        directory = weight_directory(config, run_dir)
        companions = None if source is None else Path(source)
        return DiskTransport(
            endpoints, directory, source=companions, quantization=quantization, checksums=checksums
        )
    if name == "tensor":
        return TensorTransport(endpoints)
    if name == "distributed":
        if config.uses_receiver:
            return ReceiverTransport(
                endpoints,
                address=address,
                changes_only=config.weight_changes_only,
                checksums=checksums,
            )
        return DistributedTransport(endpoints, address=address)
    if name == "ipc":
        return SharedMemoryTransport(endpoints)
    raise ValueError(f"{section}.weight_transport={name}: choose one of {', '.join(TRANSPORTS)}")


async def _run_all(steps: Iterable[Awaitable[None]]) -> None:
    """Run all to their end, then raise the first exception."""
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
