"""A web server of a few lines in a thread, for what no real server does on request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megatron_gspo.servers.http_client import ServerClient, open_session
from tests.support.threaded_server import ThreadedServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer(ThreadedServer):
    """`handler` answers every request. requests: (path, headers) of each."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._handler = handler

    async def _start(self) -> None:
        await self._serve(self._answer, max_bytes=2**26)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.headers)))
        return await self._handler(request)

    async def hang(self) -> None:
        """Until the server ends."""
        await self.stopping.wait()


def run_command(command: Callable[[ServerClient], Any], handler: Handler) -> Any:
    """The value of a command that is given the client of a server."""

    async def run(url: str) -> Any:
        session = await open_session()
        try:
            return await command(ServerClient(url, session))
        finally:
            await session.close()

    with WebServer(handler) as server:
        return asyncio.run(run(server.url))
