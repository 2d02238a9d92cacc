"""An aiohttp server in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler


class ThreadedServer:
    """Serves on a free port of the loopback while its context is open.

    A subclass implements `_start` and `_stop`.
    """

    def __init__(self) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. May be called again."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        self.stopping.set()
        await self._runner.cleanup()

    async def _serve(self, handler: Handler, *, max_bytes: int) -> None:
        """Answer every request by `handler`. max_bytes: of a request."""
        self.stopping = asyncio.Event()
        application = web.Application(client_max_size=max_bytes)
        application.router.add_route("*", "/{path:.*}", handler)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
