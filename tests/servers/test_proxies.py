"""Behind a proxy: a run reaches the servers on its machine directly, and they reach themselves."""

from __future__ import annotations

import asyncio
import socket

import psutil
import pytest
from aiohttp import web

from megatron_gspo.servers.http_client import ServerClient, ServerError, open_session
from megatron_gspo.servers.proxies import around_the_proxy, proxy_for
from megatron_gspo.servers.server_launch import server_environment
from tests.servers.web_server import WebServer

PROXY = {"http_proxy": "http://proxy.example:3128", "https_proxy": "http://proxy.example:3128"}


def entries(environment: dict[str, str]) -> list[str]:
    assert environment["no_proxy"] == environment["NO_PROXY"]
    return environment["no_proxy"].split(",")


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"])
def test_a_server_reaches_its_machine_without_the_proxy(variable):
    environment = server_environment(
        "/other", {"PATH": "/bin", variable: "http://proxy.example:3128"}
    )
    assert environment[variable] == "http://proxy.example:3128", "its downloads still go through it"
    assert {"localhost", "127.0.0.1", "::1", socket.gethostname()} <= set(entries(environment))
    local_addresses = {
        a.address
        for each in psutil.net_if_addrs().values()
        for a in each
        if a.family == socket.AF_INET
    }
    assert local_addresses <= set(entries(environment))


def test_what_the_user_excluded_stays_excluded():
    given = {**PROXY, "no_proxy": "hub.example, .internal", "NO_PROXY": "10.0.0.0/8"}
    assert entries(around_the_proxy(given))[:4] == [
        "hub.example",
        ".internal",
        "10.0.0.0/8",
        "localhost",
    ]
    assert entries(around_the_proxy({**PROXY, "NO_PROXY": "a,127.0.0.1"}))[:3] == [
        "a",
        "127.0.0.1",
        "localhost",
    ]
    assert entries(around_the_proxy({**PROXY, "no_proxy": "*"})) == ["*"], (
        "a star means all only where it is alone"
    )


def test_the_name_under_which_a_server_listens_is_excluded():
    assert "node1-ib" in entries(around_the_proxy(PROXY, "node1-ib"))
    for wildcard in ("0.0.0.0", "::", ""):
        assert wildcard not in entries(around_the_proxy(PROXY, wildcard))


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("http://node7:30000", PROXY, "http://proxy.example:3128"),
        ("http://node7:30000", {"HTTP_PROXY": "proxy.example:3128"}, "http://proxy.example:3128"),
        ("http://node7:30000", {"all_proxy": "http://all:1"}, "http://all:1"),
        ("http://node7:30000", {"https_proxy": "http://p:1"}, None),
        ("http://node7:30000", {**PROXY, "no_proxy": "node7"}, None),
        ("http://node7.internal:30000", {**PROXY, "NO_PROXY": ".internal"}, None),
        ("http://node7:30000", {**PROXY, "no_proxy": "*"}, None),
        ("http://10.1.2.3:30000", {**PROXY, "no_proxy": "a, 10.0.0.0/8"}, None),
        (
            "http://11.1.2.3:30000",
            {**PROXY, "no_proxy": "a, 10.0.0.0/8"},
            "http://proxy.example:3128",
        ),
        ("http://127.0.0.1:30000", PROXY, None),
        ("http://localhost:30000", PROXY, None),
        ("http://[::1]:30000", PROXY, None),
        (f"http://{socket.gethostname()}:30000", PROXY, None),
        ("http://node7:30000", {"http_proxy": "socks5://p:1"}, None),
        ("http://node7:30000", {"http_proxy": "", "HTTP_PROXY": "http://p:1"}, None),
        ("http://node7:30000", {}, None),
    ],
)
def test_the_proxy_of_a_server(url, environment, proxy):
    assert proxy_for(url, environment) == proxy


async def says_where(request: web.Request) -> web.StreamResponse:
    if request.method == "CONNECT" or request.url.host == "refused.example":
        return web.Response(status=403, text="denied by policy")
    return web.json_response({"host": request.headers["Host"], "path": request.path})


async def ask(*urls: str) -> list[object]:
    session = await open_session()
    try:
        return [await ServerClient(url, session).get("/health", timeout=20.0) for url in urls]
    finally:
        await session.close()


def test_our_client_asks_other_machines_through_the_proxy_and_this_one_directly(monkeypatch):
    with WebServer(says_where) as proxy, WebServer(says_where) as server:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://user:secret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        far, near = asyncio.run(ask("http://node7.example:30000", server.url))
        assert far == {"host": "node7.example:30000", "path": "/health"}
        assert near["host"] == server.url.removeprefix("http://")
        assert len(proxy.requests) == 1 and len(server.requests) == 1
        with pytest.raises(ServerError) as caught:
            asyncio.run(ask("http://refused.example:30000"))
        message = str(caught.value)
        assert "set sglang.api_key_file" not in message, "it was the proxy that refused"
        assert "add refused.example to no_proxy" in message and "secret" not in message
        assert f"through the proxy {proxy.url.removeprefix('http://')}" in message
        assert "answered 403: denied by policy" in message
