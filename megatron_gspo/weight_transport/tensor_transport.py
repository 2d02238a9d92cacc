"""Weights through /update_weights_from_tensor: by value in the request, or by handles to memory of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron_gspo.servers.http_client import Server
from megatron_gspo.servers.server_info import Capabilities
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.tensor_payload import (
    FORMAT,
    by_handle,
    by_value,
    is_this_machine,
    json_with_base64,
    shared_buffer,
)
from megatron_gspo.weight_transport.transport import Route, accepted

_PATH = "/update_weights_from_tensor"
_FIELD = "serialized_named_tensors"
# the prefix cache is flushed once, at the end: with requests still ending, 0.5.15 would die of it here
_FIELDS: dict[str, Any] = {"load_format": FORMAT, "flush_cache": False}


class TensorRoute(Route):
    """By value, in base64 over HTTP: needs nothing but the connection that there is.

    Memory of the client: the buffer, and about 2 MiB a server, since the body is made as it is sent. The server holds
    a bucket several times over while it takes it apart, and each of its tensor-parallel ranks wants a copy of its own
    in the request: tp_size times the bytes.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}

    async def open(self, server: Server, found: Capabilities, timeout: float) -> None:
        self._ranks[server.url] = found.tp_size

    async def send(self, server: Server, bucket: Bucket, timeout: float) -> None:
        payload = by_value(bucket)
        await accepted(server, _PATH, _stream([payload] * self._ranks[server.url]), timeout)


class MemoryRoute(Route):
    """By handle, for servers on this machine: CUDA IPC where the weights are on a GPU, else shared memory.

    The servers copy from the buffer; only handles go over HTTP. Every tensor-parallel rank gets a handle of its own
    (the references are counted) to the same memory: with CUDA, ranks on other GPUs copy between the GPUs, so these
    must reach each other. Servers need the same user and the same /dev/shm as this process.

    Memory: the buffer, or one as large as the largest tensor where that is larger.
    """

    device = None
    allocate = staticmethod(shared_buffer)

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}

    def refuses(self, found: Capabilities) -> str:
        host = urlsplit(found.url).hostname or ""
        if not is_this_machine(host):
            return f"{host} is another machine, and handles to memory only serve on this one; use another weight_route"
        return super().refuses(found)

    async def open(self, server: Server, found: Capabilities, timeout: float) -> None:
        self._ranks[server.url] = found.tp_size

    async def send(self, server: Server, bucket: Bucket, timeout: float) -> None:
        payloads = [[by_handle(bucket)] for _ in range(self._ranks[server.url])]
        await accepted(server, _PATH, _stream(payloads), timeout)


async def _stream(payloads: Sequence[Sequence[bytes | memoryview]]) -> AsyncIterator[bytes]:
    """The body of a request."""
    for piece in json_with_base64(_FIELDS, _FIELD, payloads):
        yield piece
