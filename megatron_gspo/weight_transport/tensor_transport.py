"""Weights in the body of HTTP requests, or as handles to memory of this machine."""

from __future__ import annotations

from urllib.parse import urlsplit

from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.sglang_payload import by_handle, by_value, is_this_machine, shared_buffer
from megatron_gspo.weight_transport.transport import Target, WeightTransport


class TensorTransport(WeightTransport):
    """By value, in base64 over HTTP; needs no other connection.

    Memory of the client: the buffer and about 2 MiB per server, since the body is produced while it is sent. A server
    holds several copies of a bucket while it unpacks it. The request has one copy for each of its tensor-parallel
    ranks: tp_size times the bytes.
    """

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        payload = by_value(bucket)
        await self.on_each(
            lambda target: self.endpoints.load_payloads(target.client, [payload] * target.info.tp_size, timeout=timeout)
        )


class SharedMemoryTransport(WeightTransport):
    """By handle, for servers on this machine: CUDA IPC if the weights are on a GPU, else shared memory.

    Servers copy from the buffer; only handles go over HTTP. Each tensor-parallel rank gets a handle of its own (the
    references are counted) to the same memory: with CUDA, ranks on other GPUs copy between GPUs, which must have peer
    access. Servers need the same user and the same /dev/shm as this process.

    Memory: the buffer, or the largest tensor if that is larger.
    """

    device = None
    allocate = staticmethod(shared_buffer)

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: a server on another machine."""
        host = urlsplit(info.url).hostname or ""
        if not is_this_machine(host):
            return f"{host} is another machine, and memory handles work on this one only; use another weight_transport"
        return super().unsupported(info)

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""

        async def hand_over(target: Target) -> None:
            payloads = [[by_handle(bucket)] for _ in range(target.info.tp_size)]
            await self.endpoints.load_payloads(target.client, payloads, timeout=timeout)

        await self.on_each(hand_over)
