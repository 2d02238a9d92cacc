"""What `SGLangEngine` says of its servers, and that it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sglang.server_pool import FleetError
from megatron_gspo.rollout.sglang.sglang_engine import EngineSettings, SGLangEngine
from megatron_gspo.weight_transport.weight_update import make_route
from tests.servers.web_server import WebServer
from tests.support.sglang_generator import FACTS, Generator


@pytest.fixture
def server() -> Iterator[Generator]:
    with Generator() as made:
        yield made


class Launcher:
    """Fails at the first question, which no launcher should."""

    def __init__(self) -> None:
        self.stopped = 0

    def poll(self) -> None:
        raise RuntimeError("a defect\nof two lines")

    def stop(self) -> None:
        self.stopped += 1


def engine_on(*urls: str, **given) -> SGLangEngine:
    return SGLangEngine(EngineSettings(urls), FACTS, make_route("tensor"), str, **given)


def test_a_watch_that_breaks_is_told(server):
    said: list[str] = []
    heard = threading.Event()
    engine = engine_on(server.url, launcher=Launcher(), say=lambda line: (said.append(line), heard.set()))
    assert heard.wait(10)
    engine.close()
    assert said == ["nobody looks after them any more (RuntimeError: a defect): end the run and start it again"]


def test_an_end_is_no_news_and_ends_everything(server):
    said: list[str] = []
    before = threading.active_count()
    engine = engine_on(server.url, say=said.append)
    assert threading.active_count() == before + 1
    engine.close()
    engine.close()
    assert said == [] and threading.active_count() == before


def test_launched_servers_are_stopped_once(server):
    launcher = Launcher()
    engine = engine_on(server.url, launcher=launcher, say=lambda line: None)
    engine.close()
    engine.close()
    assert launcher.stopped == 1


def test_an_update_without_servers_reads_the_stream_to_its_end():
    """Producing it is collective: other ranks wait for it."""
    read: list[int] = []

    def stream() -> Iterator:
        for i in range(3):
            read.append(i)
            yield f"weight.{i}", None

    engine = engine_on("http://127.0.0.1:9", say=lambda line: None)
    with pytest.raises(FleetError, match=r"^no server took weights 0: http://127.0.0.1:9: server .*connection refused"):
        engine.update_weights(stream(), version=0)
    engine.close()
    assert read == [0, 1, 2]


async def forbid(request: web.Request) -> web.Response:
    return web.Response(status=403)


def test_what_waiting_does_not_mend_ends_at_once():
    with WebServer(forbid) as server:
        engine = engine_on(server.url, say=lambda line: None)
        with pytest.raises(EngineError, match="refused with 403; set sglang.api_key_file") as caught:
            engine.update_weights(iter(()), version=0)
        engine.close()
    assert not isinstance(caught.value, FleetError)
