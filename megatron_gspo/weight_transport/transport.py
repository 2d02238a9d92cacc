"""`WeightTransport`: how a source's weights reach the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_gspo.servers.http_client import EventLoop, ServerClient, ServerError
from megatron_gspo.weight_transport.buckets import Bucket, buckets
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints

Stream = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Target:
    """A server that takes part in an update."""

    client: ServerClient
    info: ServerInfo


@dataclass(frozen=True)
class Sent:
    """The result of a transfer."""

    failures: dict[str, ServerError] = field(default_factory=dict)
    """Errors of servers, by URL."""

    again: tuple[str, ...] = ()
    """URLs of servers that work and lack tensors of this source, because another server's failure
    broke the group with them."""


class WeightTransport:
    """Base class. Each source has one, kept between updates; in a transfer it sends its own tensors
    to all servers.

    The first source's `prepare`, `publish` and `load` enclose the transfers of all sources.
    Coroutines run in the event loop, the other methods in the caller's thread.
    """

    stores = False
    """Whether the weights of all sources are taken before any server is paused; else servers are
    paused first."""

    needs_session = True
    """Whether servers with `ServerInfo.update_session` need it around this transport's requests."""

    in_flight = 1
    """Buckets that are sent at the same time."""

    device: torch.device | None = torch.device("cpu")
    """Device of the buffers, as `buckets` takes it; read when the servers have been opened."""

    allocate: Callable[[int, torch.device], Tensor] | None = None
    """Allocates the buffers, as `buckets` takes it; read when the servers have been opened."""

    def __init__(self, endpoints: WeightEndpoints, *, checksums: bool = False) -> None:
        """checksums: whether the servers prove an update by checksums
        (`WeightEndpoints.clear_weights`).
        """
        self.endpoints = endpoints
        self.checksums = checksums
        self.targets: dict[str, Target] = {}
        self.failures: dict[str, ServerError] = {}

    def unsupported(self, info: ServerInfo) -> str:
        """Why this server can't be updated this way, with the fix; "" if it can."""
        if info.dp_size > 1:
            return (
                f"has dp_size {info.dp_size}, and data-parallel ranks take weights from files only;"
                " start one server for each, or use weight_transport=disk"
            )
        return ""

    def takes_all_sources(self, infos: list[ServerInfo]) -> bool:
        """Whether these servers take all sources at the same time; else one after the other."""
        return self.stores

    def prepare(self, version: str) -> None:
        """Before the transfers of all sources."""

    def publish(self, num_sources: int) -> None:
        """After the transfers of all sources."""

    async def load(self, server: ServerClient, timeout: float) -> None:
        """Load what was published."""

    def transfer(
        self,
        loop: EventLoop,
        targets: Mapping[str, Target],
        stream: Stream,
        *,
        bucket_bytes: int,
        timeout: float,
    ) -> Sent:
        """Send the source's tensors to these servers, which are paused; from any thread but the
        loop's, after `begin`.

        Raises ValueError for a repeated name, DiskError if weights can't be written.

        Args:
            stream: (Hugging Face name, full tensor); always read to its end, since producing it may
                be collective. Memory: `bucket_bytes` bytes and what the transport adds.
            timeout: seconds of a server to load one bucket.
        """
        tensors = iter(stream)
        try:
            loop.run(self.open(targets, timeout))
            for bucket in buckets(
                self.select(tensors),
                bucket_bytes,
                device=self.device,
                allocate=self.allocate,
                in_flight=self.in_flight,
            ):
                if self.is_over:
                    break
                if bucket.data.is_cuda:
                    # Other threads and processes read it.
                    torch.cuda.current_stream(bucket.data.device).synchronize()
                self.store(bucket)
                loop.run(self.send(bucket, timeout))
                if bucket.nbytes > bucket_bytes // self.in_flight:  # it is the stream's own memory
                    loop.run(self.flush(timeout))
            return loop.run(self.finish(timeout))
        except Exception:  # whatever it is, the servers must be let go of; it is raised again
            loop.run(self.abort())
            raise
        finally:
            for _ in tensors:
                pass

    def begin(self, version: str, source_number: int) -> None:
        """Before a transfer. source_number: of the source that sends, from 0."""

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        """Begin a transfer to these servers, which are paused."""
        self.targets = dict(targets)
        self.failures = {}

    @property
    def is_over(self) -> bool:
        """Whether no server can get further buckets of this transfer."""
        return not self.stores and not self.targets

    def select(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the stream that are to be sent."""
        return tensors

    def store(self, bucket: Bucket) -> None:
        """Keep a bucket or write it, before it is sent."""

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """Send a bucket to the servers. Its memory is free for reuse `in_flight` buckets later."""

    async def flush(self, timeout: float) -> None:
        """Wait until the memory of all buckets is free."""

    async def finish(self, timeout: float) -> Sent:
        """End the transfer: every bucket is loaded, or its server has failed."""
        return Sent(self.failures)

    async def abort(self) -> None:
        """End a transfer that cannot be completed. Raises nothing."""

    def close(self) -> None:
        """Free what is kept between updates. May be called again."""

    async def on_each(self, step: Callable[[Target], Awaitable[None]]) -> None:
        """A step with all servers concurrently; those that fail get no further buckets."""

        async def guarded(url: str, target: Target) -> None:
            try:
                await step(target)
            except ServerError as error:
                self.failures[url] = error
                del self.targets[url]

        await asyncio.gather(*(guarded(url, target) for url, target in list(self.targets.items())))
