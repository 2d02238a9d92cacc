"""What `update_servers` asks of a way for weights to travel."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.servers.http_client import Server, ServerError
from megatron_gspo.servers.server_info import Capabilities
from megatron_gspo.weight_transport.buckets import Bucket


class Route:
    """A way for weights to travel. Methods with a server raise `ServerError`; they run in the event loop, for all
    servers at once. The others run in the caller's thread. Those that a route has no use for do nothing.

    stores: the whole stream is taken before any server is stopped; else servers stop and get bucket by bucket.
    needs_session: servers that know /begin_weight_update want it and /end_weight_update around this route's requests.
    device, allocate: of the buffer, as `buckets` takes them; read when all servers have been opened.
    """

    stores = False
    needs_session = True
    device: torch.device | None = torch.device("cpu")
    allocate: Callable[[int, torch.device], Tensor] | None = None

    def refuses(self, found: Capabilities) -> str:
        """Why this server can't get its weights this way, with the fix; empty if it can."""
        if found.dp_size > 1:
            return (f"has dp_size {found.dp_size}, and SGLang updates no server with data-parallel ranks; start one "
                    "server for each, or use sglang.weight_transport=disk")  # fmt: skip
        return ""

    def begin(self, version: str) -> None:
        """Before the first bucket."""

    def take(self, bucket: Bucket) -> None:
        """A bucket, once for all servers."""

    def end(self) -> None:
        """After the last bucket."""

    async def open(self, server: Server, found: Capabilities, timeout: float) -> None:
        """Before the first bucket of this server, which is paused."""

    async def send(self, server: Server, bucket: Bucket, timeout: float) -> None:
        """A bucket to this server; it has loaded it when this returns."""

    async def finish(self, server: Server, timeout: float) -> None:
        """After the last bucket of this server."""

    def settled(self, server: Server, version: str) -> None:
        """The server serves this version now."""

    async def leave(self, server: Server, timeout: float) -> None:
        """The server has failed: let go of what it holds. Raises nothing."""

    def close(self) -> None:
        """Free what is kept from one update to the next. Calling it twice is fine."""


async def accepted(
    server: Server, path: str, body: Mapping[str, Any] | AsyncIterable[bytes], timeout: float
) -> dict[str, Any]:
    """POST and check what the answer says of itself. Raises `ServerError` unless it says `"success": true`."""
    answer = await server.post(path, body, timeout=timeout)
    if not isinstance(answer, dict) or answer.get("success") is not True:
        said = answer.get("message", answer) if isinstance(answer, dict) else answer
        words = " ".join(server.without_key(str(said).encode()).decode().split())[:200]
        raise ServerError(f"server {server.url}{path}: did not succeed: {words}", retry=False)
    return answer
