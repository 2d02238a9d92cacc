"""Weights in the body of HTTP requests, or as handles to memory of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.sglang_payload import (
    by_handle,
    by_value,
    is_this_machine,
    shared_buffer,
)
from megatron_gspo.weight_transport.transport import Target, WeightTransport


class TensorTransport(WeightTransport):
    """By value, in base64 over HTTP; needs no other connection.

    Memory of the client: the buffer and about 2 MiB per server, since the body is produced while it
    is sent. A server holds several copies of a bucket while it unpacks it. The request has one copy
    for each of its tensor-parallel ranks: tp_size times the bytes.
    """

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        payload = by_value(bucket)
        await self.on_each(
            lambda target: self.endpoints.load_payloads(
                target.client, [payload] * target.info.tp_size, timeout=timeout
            )
        )


class SharedMemoryTransport(WeightTransport):
    """By handle, for servers on this machine: CUDA IPC if the weights are on a GPU, else shared
    memory.

    Servers copy from the buffer before they answer; only handles go over HTTP. All sources send at
    the same time: a server takes one request after the other. Each of its tensor-parallel ranks
    gets a handle of its own (the references are counted) to the same memory: with CUDA, ranks on
    other GPUs copy between GPUs, which they must see, with peer access. Servers need the same user
    and the same /dev/shm as this process.

    Memory: the buffer, or the largest tensor if that is larger.
    """

    device = None
    allocate = staticmethod(shared_buffer)

    def takes_all_sources(self, infos: list[ServerInfo]) -> bool:
        """See `WeightTransport.takes_all_sources`."""
        return True

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        """See `WeightTransport.open`. A server on another machine fails."""
        await super().open(targets, timeout)
        for url in targets:
            if not is_this_machine(urlsplit(url).hostname or ""):
                problem = (
                    "is on another machine, and memory handles work on one; use another"
                    " weight_transport"
                )
                self.failures[url] = ServerError(f"server {url}: {problem}", retry=False)
                del self.targets[url]

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""

        async def hand_over(target: Target) -> None:
            payloads = [[by_handle(bucket)] for _ in range(target.info.tp_size)]
            await self.endpoints.load_payloads(target.client, payloads, timeout=timeout)

        await self.on_each(hand_over)
