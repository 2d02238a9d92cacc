"""`WeightTransport`: how weights reach the servers. `update_servers` calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints


class WeightTransport:
    """Base class; its methods do nothing. Those with a server run in the event loop, concurrently for all servers, and
    raise `ServerError`; the others run in the caller's thread.

    stores: the whole stream is taken before any server is paused; else servers are paused first and get each bucket.
    needs_session: servers with `ServerInfo.update_session` need it around this transport's requests.
    device, allocate: of the buffer, as `buckets` takes them; read when all servers have been opened.
    """

    stores = False
    needs_session = True
    device: torch.device | None = torch.device("cpu")
    allocate: Callable[[int, torch.device], Tensor] | None = None

    def __init__(self, endpoints: WeightEndpoints) -> None:
        self.endpoints = endpoints

    def unsupported(self, info: ServerInfo) -> str:
        """Why this server can't be updated this way, with the fix; "" if it can."""
        if info.dp_size > 1:
            return (f"has dp_size {info.dp_size}, and data-parallel ranks take weights from files only; start one "
                    "server for each, or use weight_transport=disk")  # fmt: skip
        return ""

    def begin(self, version: str) -> None:
        """Before the first bucket."""

    def take(self, bucket: Bucket) -> None:
        """A bucket, once for all servers."""

    def end(self) -> None:
        """After the last bucket."""

    async def open(self, server: ServerClient, info: ServerInfo, timeout: float) -> None:
        """Before the first bucket of this server, which is paused."""

    async def send(self, server: ServerClient, bucket: Bucket, timeout: float) -> None:
        """Send a bucket to this server; returns when the server has loaded it."""

    async def finish(self, server: ServerClient, timeout: float) -> None:
        """After the last bucket of this server."""

    def completed(self, server: ServerClient, version: str) -> None:
        """The server serves this version."""

    async def abandon(self, server: ServerClient, timeout: float) -> None:
        """The server has failed: free what it holds for this update. Raises nothing."""

    def close(self) -> None:
        """Free what is kept between updates. May be called again."""
