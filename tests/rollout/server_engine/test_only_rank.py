"""What the client of rank 0 logs about its servers, and that it and their updates end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from aiohttp import web

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.weight_transport.weight_update import make_transport
from tests.servers.web_server import WebServer
from tests.support.server_engine import ServerEngine
from tests.support.sglang_generator import MODEL, Generator


@pytest.fixture
def server() -> Iterator[Generator]:
    with Generator() as made:
        yield made


class Launcher:
    """Fails at the first question, which no launcher should."""

    def __init__(self, url: str) -> None:
        self.urls = [url]
        self.stopped = 0

    def poll(self) -> None:
        raise RuntimeError("a defect\nof two lines")

    def stop(self) -> None:
        self.stopped += 1


def engine_on(
    *urls: str, log: Callable[[str], None], colocated: bool = False, processes=None
) -> ServerEngine:
    config = ServerConfig(urls=urls, weight_transport="tensor", colocated=colocated)
    transport = make_transport(config, SGLangAPI())
    client = RolloutClient(urls, config, MODEL, str, api=SGLangAPI(), processes=processes, log=log)
    return ServerEngine(config, client, transport, log=log)


def test_a_watch_that_breaks_is_told(server):
    said: list[str] = []
    heard = threading.Event()

    def log(line: str) -> None:
        said.append(line)
        heard.set()

    engine = engine_on(server.url, processes=Launcher(server.url), log=log)
    assert heard.wait(10)
    engine.close()
    assert said == [
        "the servers are no longer monitored (RuntimeError: a defect): stop the run and start it"
        " again"
    ]


def test_launched_servers_are_stopped_once(server):
    launcher = Launcher(server.url)
    engine = engine_on(server.url, processes=launcher, log=lambda line: None)
    engine.close()
    engine.close()
    assert launcher.stopped == 1


def test_an_update_without_servers_names_them_and_begins_no_stream():
    """On no rank: producing it is collective."""
    read: list[int] = []

    def stream() -> Iterator:
        read.append(0)
        yield "weight", torch.ones(1)

    engine = engine_on("http://127.0.0.1:9", log=lambda line: None)
    problem = r"^no server took weights 0: http://127.0.0.1:9: server .*connection refused"
    with pytest.raises(NoServerError, match=problem):
        engine.update_weights(stream(), version=0)
    engine.close()
    assert read == []


def test_released_memory_comes_back_with_the_weights_also_of_the_same_version():
    """What a server had in it is lost."""
    version = ""
    calls = []

    async def accept(request: web.Request) -> web.Response:
        nonlocal version
        body = await request.json() if request.method == "POST" else {}
        version = body.get("new_version", version)
        if "memory" in request.path or "weights_from" in request.path:
            calls.append(" ".join((request.path, *body.get("tags", ()))))
        return web.json_response({"success": True, "weight_version": version})

    with WebServer(accept) as server:
        engine = engine_on(server.url, colocated=True, log=lambda line: None)
        for _ in range(2):
            engine.update_weights(iter([("a", torch.ones(2))]), version=0)
            engine.client.release_memory()
            engine.client.release_memory()
        engine.update_weights(iter([("a", torch.ones(2))]), version=0)
        engine.update_weights(iter([("a", torch.ones(2))]), version=0)  # it has them
        engine.close()
    again = [
        "/release_memory_occupation kv_cache weights",
        "/resume_memory_occupation weights",
        "/update_weights_from_tensor",
        "/resume_memory_occupation kv_cache",
    ]
    assert calls == ["/update_weights_from_tensor", *again, *again]


def answering(status: int) -> Callable[[web.Request], object]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    return answer


@pytest.mark.parametrize(
    "act",
    [
        lambda engine: engine.client.check_servers(),
        lambda engine: engine.update_weights(iter(()), version=0),
    ],
    ids=["at the start", "in an update"],
)
def test_what_waiting_does_not_mend_ends_at_once(act):
    with WebServer(answering(403)) as server:
        engine = engine_on(server.url, log=lambda line: None)
        line = rf"^server {server.url}\S*: refused with 403; set sglang.api_key_file"
        with pytest.raises(EngineError, match=line) as caught:
            act(engine)
        engine.close()
    assert not isinstance(caught.value, NoServerError)


def test_a_server_that_is_still_starting_is_waited_for():
    with WebServer(answering(503)) as server:
        engine = engine_on(server.url, log=lambda line: None)
        engine.client.check_servers()
        engine.close()
