"""One request to one server: the result is JSON within its bound and deadline, or one kind of
error.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import threading
import time
import traceback
import zlib
from collections.abc import Iterator

import pytest
from aiohttp import web

from megatron_gspo.errors import EngineError
from megatron_gspo.parallel.typed_messages import decode, encode
from megatron_gspo.rollout.sglang.sglang_api import _post_checked
from megatron_gspo.servers import http_client as http
from megatron_gspo.servers.http_client import (
    EventLoop,
    ServerClient,
    ServerError,
    open_session,
)
from tests.servers.web_server import WebServer

KEY = "a-key-that-nobody-may-see"
BOMB = gzip.compress(b" " * 2**26)  # 64 MiB in 64 KiB


async def handle(request: web.Request) -> web.StreamResponse:
    path = request.path
    if path == "/echo":
        body = await request.json() if request.can_read_body else None
        return web.json_response({"method": request.method, "body": body})
    if path.startswith("/status/"):
        # a server that quotes the request in its error
        words = f"line one\nheaders were {dict(request.headers)} " + "x" * 1000
        return web.Response(status=int(path.rpartition("/")[2]), text=words)
    if path == "/fails":
        return web.json_response({"success": False, "message": f"no:\n{dict(request.headers)}"})
    if path == "/redirect":
        raise web.HTTPTemporaryRedirect("/echo")
    if path == "/parts":
        # Without a content length.
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        for piece in (b"[1, ", b"2" * 10**5, b"]"):
            await response.write(piece)
        return response
    if path == "/text":
        return web.Response(text="fine")
    if path == "/broken":
        return web.Response(body=b'{"a": ', content_type="application/json")
    if path == "/deep":
        return web.Response(body=b"[" * 10**5, content_type="application/json")
    if path == "/latin":
        return web.Response(body=b'"\xff\xfe\xfd"', content_type="application/json")
    if path == "/slow":
        await asyncio.sleep(60.0)
        return web.json_response({})
    if path == "/bomb":
        return web.Response(
            body=BOMB, content_type="application/json", headers={"Content-Encoding": "gzip"}
        )
    if path == "/deflated":
        return web.Response(
            body=zlib.compress(b"{}"),
            content_type="application/json",
            headers={"Content-Encoding": "deflate"},
        )
    if path == "/hang":
        await server_of(request).hang()
    return await pour(request)


async def pour(request: web.Request) -> web.StreamResponse:
    """Bytes without end, in chunks."""
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    try:
        while True:
            await response.write(b" " * 2**14)
    except ConnectionError:
        return response


def server_of(_: web.Request) -> WebServer:
    return SERVERS[0]


SERVERS: list[WebServer] = []


@pytest.fixture(scope="module")
def upstream() -> Iterator[WebServer]:
    with WebServer(handle) as server:
        SERVERS.append(server)
        yield server
        SERVERS.remove(server)


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def session(loop: EventLoop) -> Iterator:
    made = loop.run(open_session())
    yield made
    loop.run(made.close())


@pytest.fixture(scope="module")
def server(upstream: WebServer, session) -> ServerClient:
    return ServerClient(upstream.url + "/", session, api_key=KEY)


def fails(loop: EventLoop, exchange) -> ServerError:
    with pytest.raises(ServerError) as caught:
        loop.run(exchange)
    words = "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert KEY not in words and KEY not in repr(caught.value)
    return caught.value


def test_json_both_ways(loop, server, upstream):
    assert loop.run(server.post("/echo", {"ids": [1, 2]}, timeout=60)) == {
        "method": "POST",
        "body": {"ids": [1, 2]},
    }
    assert loop.run(server.post("/echo", timeout=60)) == {"method": "POST", "body": {}}
    assert loop.run(server.get("/echo", timeout=60))["method"] == "GET"
    assert loop.run(server.get("/text", timeout=60)) == "fine"
    assert upstream.requests[-1][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "path, words", [("/text", b"fine"), ("/parts", b"[1, " + b"2" * 10**5 + b"]")]
)
def test_a_body_as_it_came(loop, server, path, words):
    """Of a length that the server declares, and of one that it doesn't."""
    assert loop.run(server.post_for_bytes(path, {}, timeout=60, max_bytes=len(words))) == words
    with pytest.raises(ServerError, match="at most|more than"):
        loop.run(server.post_for_bytes(path, {}, timeout=60, max_bytes=len(words) - 1))


def test_without_a_key_none_is_sent(loop, session, upstream):
    loop.run(ServerClient(upstream.url, session).get("/echo", timeout=60))
    assert "Authorization" not in upstream.requests[-1][1]


@pytest.mark.parametrize(
    "status, retry",
    [
        (400, False),
        (404, False),
        (408, True),
        (422, False),
        (425, True),
        (429, True),
        (500, True),
        (502, True),
        (503, True),
        (504, True),
    ],
)
def test_a_status_but_200(loop, server, status, retry):
    error = fails(loop, server.post(f"/status/{status}", timeout=60))
    assert (error.status, error.retry, error.sent) == (status, retry, True)
    assert str(error).startswith(
        f"server {server.url}/status/{status}: answered {status}: line one headers were"
    )


def test_a_failure_that_is_said_with_status_200(loop, server):
    error = fails(loop, _post_checked(server, "/fails", {}, 5))
    assert str(error).startswith(f"server {server.url}/fails: did not succeed: no: {{")
    assert "Bearer ***" in str(error)


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused(loop, server, status):
    error = fails(loop, server.get(f"/status/{status}", timeout=60))
    assert (error.status, error.retry) == (status, False)
    assert f"refused with {status}; set sglang.api_key_file" in str(error)


def test_redirects_are_not_followed(loop, server, upstream):
    before = len(upstream.requests)
    error = fails(loop, server.get("/redirect", timeout=60))
    assert (error.status, error.retry) == (307, False)
    assert [path for path, _ in upstream.requests[before:]] == ["/redirect"]


@pytest.mark.parametrize("path", ["/broken", "/deep", "/latin"])
def test_what_is_no_json(loop, server, path):
    error = fails(loop, server.get(path, timeout=60))
    assert "the answer is not JSON" in str(error) and error.retry and error.sent


def test_the_deadline_is_of_the_whole_exchange(loop, server):
    for path in ("/slow", "/hang"):
        began = time.monotonic()
        error = fails(loop, server.post(path, timeout=2.0))
        assert time.monotonic() - began < 30.0
        assert "no answer within 2 s" in str(error) and error.retry and error.sent
    # It answers at once and continues.
    error = fails(loop, server.get("/pour", timeout=0.2, max_bytes=2**40))
    assert "no answer within 0.2 s" in str(error)


def test_an_answer_is_refused_as_it_exceeds_its_bound(loop, server):
    error = fails(loop, server.get("/pour", timeout=60, max_bytes=10**5))
    assert "the answer has more than the expected 100000 bytes" in str(error) and error.retry
    error = fails(loop, server.get("/text", timeout=60, max_bytes=3))
    assert "the answer has 4 bytes, at most 3 are expected" in str(error)
    assert loop.run(server.get("/text", timeout=60, max_bytes=4)) == "fine"
    # An error's words too.
    error = fails(loop, server.get("/status/500", timeout=60, max_bytes=100))
    assert "at most 100 are expected" in str(error)


@pytest.mark.parametrize("path", ["/bomb", "/deflated"])
def test_nothing_compressed_is_asked_for_or_unpacked(loop, server, upstream, path):
    """64 KiB would become 64 MiB within one read."""
    error = fails(loop, server.get(path, timeout=60, max_bytes=10**6))
    assert "compressed" in str(error)
    assert upstream.requests[-1][1]["Accept-Encoding"] == "identity"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_connection(loop, session):
    dead = ServerClient(f"http://127.0.0.1:{free_port()}", session, api_key=KEY)
    error = fails(loop, dead.get("/health", timeout=60))
    assert str(error).endswith("/health: no connection (connection refused)")
    assert error.retry and not error.sent and error.status is None


def test_a_host_that_takes_no_connection(loop, session, monkeypatch):
    """Its backlog is full: the request can't have been seen."""
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(("127.0.0.1", port))
        error = fails(
            loop, ServerClient(f"http://127.0.0.1:{port}", session).get("/health", timeout=60)
        )
        for each in waiting:
            each.close()
    assert "no connection" in str(error) and error.retry and not error.sent


@pytest.mark.parametrize(
    "said, words",
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "ended within the answer"),
        (b"\x00\x01 no HTTP\r\n\r\n", "the connection broke"),
    ],
)
def test_a_broken_connection(loop, session, said, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(2**16)
            connection.sendall(said)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        error = fails(
            loop,
            ServerClient(
                f"http://127.0.0.1:{listener.getsockname()[1]}", session, api_key=KEY
            ).post("/generate", timeout=60),
        )
        thread.join()
    assert words in str(error) and error.retry and error.sent


def test_the_key_is_in_no_log_and_no_repr(loop, server, caplog):
    with caplog.at_level(logging.DEBUG):
        loop.run(server.post("/echo", {}, timeout=60))
        fails(loop, server.post("/status/500", timeout=60))
    assert KEY not in caplog.text and KEY not in repr(server) and KEY not in str(server)


def test_an_error_reaches_the_other_ranks_whole():
    error = decode(
        encode(ServerError("server a: gone", status=503, retry=True, sent=False)), EngineError
    )
    assert type(error) is ServerError
    assert (str(error), error.status, error.retry, error.sent) == (
        "server a: gone",
        503,
        True,
        False,
    )
