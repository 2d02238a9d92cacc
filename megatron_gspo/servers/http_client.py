"""JSON over HTTP with one SGLang server: keep-alive, deadlines, a bound on answers, one kind of error."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from megatron_gspo.config.server_urls import check_url
from megatron_gspo.errors import EngineError, first_line

T = TypeVar("T")

CONNECT_SECONDS = 10.0  # longest wait for a connection; within it a server that is alive accepts one
ANSWER_BYTES = 64 * 2**20  # default bound of an answer; a generation's is computed from what was asked for
_IDLE_SECONDS = 4.0  # that a connection is kept for: servers close theirs after 5, and a request then may be lost
_QUOTED = 200  # characters of a server's own words in an error
_CHUNK = 1 << 16


class ServerError(EngineError):
    """One request to one server that failed: a line with the server, the path and what happened, never the API key.

    status: HTTP status, None where there was no whole answer. retry: whether the same request may succeed later or
    at another server; False where the request itself was refused. sent: False where the server can't have seen it.
    """

    def __init__(self, message: str, *, status: int | None = None, retry: bool, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.retry, self.sent = status, retry, sent


async def open_session() -> aiohttp.ClientSession:
    """The connections that all `Server`s of an event loop share: kept alive, unlimited in number (the callers bound
    what is under way), no proxy from the environment. Close it in the loop that opened it."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)


class Server:
    """One server, or a router in front of several.

    url: `http://host:port` or https, without path. api_key: sent as a bearer token to this server alone.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, api_key: str | None = None) -> None:
        self.url = check_url(url)
        self._session = session
        self._key = api_key
        # what is compressed can't be bounded as it arrives: one read may hold a thousand times its size
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def __repr__(self) -> str:
        return f"Server({self.url})"

    async def post(self, path: str, body: Mapping[str, Any] | AsyncIterable[bytes] | None = None, *, timeout: float,
                   max_bytes: int = ANSWER_BYTES) -> Any:
        """The parsed JSON answer (text where it isn't JSON) to a POST of `body`: an object, or JSON in pieces, which
        are sent as they come and are never whole in memory.

        timeout: seconds for the whole exchange. max_bytes: a longer answer is refused as it arrives. Raises
        `ServerError` for any status but 200, no or a broken answer, and the deadline. Redirects are not followed.
        """
        return await self._exchange("POST", path, {} if body is None else body, timeout, max_bytes)

    async def get(self, path: str, *, timeout: float, max_bytes: int = ANSWER_BYTES) -> Any:
        """As `post`, for GET."""
        return await self._exchange("GET", path, None, timeout, max_bytes)

    def without_key(self, words: bytes) -> bytes:
        """A server's words, which may quote the request or the server's own settings."""
        return words.replace(self._key.encode(), b"***") if self._key else words

    async def _exchange(self, method: str, path: str, body: Any, timeout: float, max_bytes: int) -> Any:
        where = f"server {self.url}{path}"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        content, headers = {"json": body}, self._headers
        if isinstance(body, AsyncIterable):
            content, headers = {"data": body}, {"Content-Type": "application/json", **self._headers}
        try:
            async with self._session.request(method, self.url + path, **content, headers=headers,
                                             timeout=limits, allow_redirects=False) as response:
                payload = await _read(response, max_bytes, where)
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"{where}: no connection (nobody takes it)", retry=True, sent=False) from None
        except aiohttp.ClientConnectorError as error:
            known = error.errno is not None and error.errno > 0  # negative: of the search for its address
            reason = (os.strerror(error.errno) if known else error.strerror or first_line(error)).lower()
            raise ServerError(f"{where}: no connection ({reason})", retry=True, sent=False) from None
        except asyncio.TimeoutError:
            raise ServerError(f"{where}: no answer within {timeout:g} s", retry=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{where}: the connection broke ({_name(error)})", retry=True) from None
        if response.status != 200:
            raise _refusal(where, response.status, self.without_key(payload))
        return _parsed(payload, response.content_type, where)


async def _read(response: aiohttp.ClientResponse, max_bytes: int, where: str) -> bytes:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ServerError(f"{where}: the answer is compressed, which wasn't asked for", retry=True)
    declared = response.content_length
    if declared is not None and declared > max_bytes:
        raise ServerError(f"{where}: the answer has {declared} bytes, at most {max_bytes} are expected", retry=True)
    parts, size = [], 0
    async for part in response.content.iter_chunked(_CHUNK):
        size += len(part)
        if size > max_bytes:
            response.close()
            raise ServerError(f"{where}: the answer has more than the expected {max_bytes} bytes", retry=True)
        parts.append(part)
    return b"".join(parts)


def _refusal(where: str, status: int, payload: bytes) -> ServerError:
    words = " ".join(payload[: 4 * _QUOTED].decode(errors="replace").split())[:_QUOTED]
    if status in (401, 403):
        return ServerError(f"{where}: refused with {status}; set sglang.api_key_file to the server's key",
                           status=status, retry=False)
    retry = status in (408, 425, 429) or status >= 500
    return ServerError(f"{where}: answered {status}" + (f": {words}" if words else ""), status=status, retry=retry)


def _parsed(payload: bytes, content_type: str, where: str) -> Any:
    if "json" not in content_type:
        return payload.decode(errors="replace")
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise ServerError(f"{where}: the answer is not JSON ({len(payload)} bytes)", retry=True) from None


def _name(error: BaseException) -> str:
    return {"ServerDisconnectedError": "closed without an answer", "ClientPayloadError": "ended within the answer",
            "ConnectionResetError": "reset by the server"}.get(type(error).__name__, first_line(error))


class EventLoop:
    """An asyncio loop in a daemon thread, so that requests go on while the training thread works."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-requests", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The coroutine's result, awaited from another thread. An interrupt or the timeout (seconds) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Begin a coroutine; cancel what is returned to end it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread. Calling it twice is fine."""
        if self._loop.is_closed():
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
