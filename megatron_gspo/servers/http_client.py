"""JSON over HTTP with one inference server: keep-alive, timeouts, bounded responses, one kind
of error.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from megatron_gspo.config.server_urls import check_url, without_password
from megatron_gspo.errors import EngineError, first_line
from megatron_gspo.servers.proxies import proxy_for

T = TypeVar("T")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, of a request or a response."""

CONNECT_SECONDS = 10.0  # timeout of a connection; a server that is alive accepts one sooner
MAX_RESPONSE_BYTES = 64 * 2**20  # default; the bound of a generation is computed from its request
# Seconds that our servers keep a connection; with their default of 5 a busy one closes what is
# about to be used
SERVER_KEEP_ALIVE = 60
# So long a connection is kept: servers close theirs after 5, and a request could then be lost.
_IDLE_SECONDS = 4.0
_MAX_QUOTED = 200  # characters of a server's error in ours
_CHUNK = 1 << 16
_KEY_SETTING = "sglang.api_key_file (or vllm.api_key_file)"


class ServerError(EngineError):
    """A failed request to a server: one line with the server, the path and the reason, never the
    API key.

    status: HTTP status, None without a complete response. retry: whether the same request may
    succeed later or at another server; False if the request itself was refused. sent: False if the
    server can't have seen it.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry: bool, sent: bool = True
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry = retry
        self.sent = sent


async def open_session() -> aiohttp.ClientSession:
    """The connections that all `ServerClient`s of an event loop share: kept alive, unlimited in
    number (callers limit the requests in flight). Proxies of the environment are the client's
    matter. Close it in the loop that opened it.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)


class ServerClient:
    """Client of one server, or of a router in front of several.

    url: `http://host:port` or https, without path. api_key: sent as a bearer token to this server
    alone. key_setting: what sets it, for messages. A server on this machine is reached directly,
    another one through the proxy that the environment names for it, if any.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        api_key: str | None = None,
        key_setting: str = _KEY_SETTING,
    ) -> None:
        self.url = check_url(url)
        self._session = session
        self._key = api_key
        self._key_setting = key_setting
        self._proxy = proxy_for(self.url)
        # a compressed response can't be bounded while it is read: one chunk may expand a
        # thousandfold
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __repr__(self) -> str:
        return f"ServerClient({self.url})"

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | AsyncIterable[bytes] | None = None,
        *,
        timeout: float,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> Any:
        """POST `body`: an object, or JSON in pieces, which are streamed. Returns the parsed JSON
        (or other text).

        Raises `ServerError` for a status other than 200, an invalid or no response, and the
        timeout. Redirects are not followed.

        Args:
            timeout: seconds for the whole exchange.
            max_bytes: a longer response is refused while it is read.
        """
        if body is None:
            body = {}
        payload, content_type = await self._exchange("POST", path, body, timeout, max_bytes)
        return self._parsed(payload, content_type, path)

    async def post_for_bytes(
        self, path: str, body: Mapping[str, Any], *, timeout: float, max_bytes: int
    ) -> bytearray:
        """Like `post`, but returns the body of the response as it came, in one buffer."""
        payload, _ = await self._exchange("POST", path, body, timeout, max_bytes)
        return payload

    async def get(self, path: str, *, timeout: float, max_bytes: int = MAX_RESPONSE_BYTES) -> Any:
        """Like `post`, for GET."""
        payload, content_type = await self._exchange("GET", path, None, timeout, max_bytes)
        return self._parsed(payload, content_type, path)

    def redact(self, words: bytes) -> bytes:
        """A server's message without the API key, which it may quote."""
        if not self._key:
            return words
        return words.replace(self._key.encode(), b"***")

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | AsyncIterable[bytes] | None,
        timeout: float,
        max_bytes: int,
    ) -> tuple[bytearray, str]:
        """The body of the response and its content type."""
        where = f"server {self.url}{path}"
        if self._proxy is not None:
            avoid = f"add {urlsplit(self.url).hostname} to no_proxy to avoid it"
            where += f" (through the proxy {without_password(self._proxy)}; {avoid})"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        headers = self._headers
        data: AsyncIterable[bytes] | bytes | None = None
        if isinstance(body, AsyncIterable):
            data = body
        elif body is not None:
            data = msgspec.json.encode(body)  # long prompts: a tenth of the time of `json`
        if data is not None:
            headers = {"Content-Type": "application/json", **self._headers}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                timeout=limits,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                payload = await _read(response, max_bytes, where)
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(
                f"{where}: no connection (not accepted)", retry=True, sent=False
            ) from None
        except aiohttp.ClientConnectorError as error:
            number = error.errno or 0
            reason = error.strerror or first_line(error)
            if number > 0:  # else it is of the name resolution
                reason = os.strerror(number)
            raise ServerError(
                f"{where}: no connection ({reason.lower()})", retry=True, sent=False
            ) from None
        except TimeoutError:
            raise ServerError(f"{where}: no answer within {timeout:g} s", retry=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(
                f"{where}: the connection broke ({_name(error)})", retry=True
            ) from None
        if response.status != 200:
            by_proxy = self._proxy is not None and response.status in (403, 407)
            if response.status in (401, 403) and not by_proxy:
                raise ServerError(
                    f"{where}: refused with {response.status}; set {self._key_setting} to its key",
                    status=response.status,
                    retry=False,
                )
            raise _status_error(where, response.status, self.redact(bytes(payload)))
        return payload, response.content_type

    def _parsed(self, payload: bytearray, content_type: str, path: str) -> Any:
        if "json" not in content_type:
            return payload.decode(errors="replace")
        try:
            return msgspec.json.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: not UTF-8
            where = f"server {self.url}{path}"
            raise ServerError(
                f"{where}: the answer is not JSON ({len(payload)} bytes)", retry=True
            ) from None


async def _read(response: aiohttp.ClientResponse, max_bytes: int, where: str) -> bytearray:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ServerError(f"{where}: the answer is compressed, which was not requested", retry=True)
    declared = response.content_length
    if declared is not None and declared > max_bytes:
        raise ServerError(
            f"{where}: the answer has {declared} bytes, at most {max_bytes} are expected",
            retry=True,
        )
    # Of its final size at once; joining parts would hold it twice.
    payload = bytearray(declared or 0)
    size = 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        if size + len(chunk) > max_bytes:
            response.close()
            raise ServerError(
                f"{where}: the answer has more than the expected {max_bytes} bytes", retry=True
            )
        payload[size : size + len(chunk)] = chunk
        size += len(chunk)
    return payload


def _status_error(where: str, status: int, payload: bytes) -> ServerError:
    words = " ".join(payload[: 4 * _MAX_QUOTED].decode(errors="replace").split())[:_MAX_QUOTED]
    retry = status in (408, 425, 429) or status >= 500
    return ServerError(
        f"{where}: answered {status}" + (f": {words}" if words else ""), status=status, retry=retry
    )


def _name(error: BaseException) -> str:
    names = {
        "ServerDisconnectedError": "closed without an answer",
        "ClientPayloadError": "ended within the answer",
        "ConnectionResetError": "reset by the server",
    }
    return names.get(type(error).__name__, first_line(error))


class EventLoop:
    """An asyncio loop in a daemon thread, so that requests continue while the training thread
    works.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout-requests", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The coroutine's result, awaited from another thread.

        An interrupt or the timeout (seconds) cancels it.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancel the returned future to stop it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called again."""
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
