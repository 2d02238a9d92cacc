"""The fault proxy injects the requested faults only. Upstream here: a web server with one fixed answer."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from aiohttp import web

from tests.support.fault_proxy import CHANGES, VLLM_CHANGES, Fault, FaultProxy

ROUTES = np.arange(4 * 2 * 2, dtype=np.int32)  # 4 rows, 2 layers, 2 experts
ANSWER = {
    "output_ids": [7, 8, 9],
    "meta_info": {
        "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None], [-0.3, 9, None]],
        "routed_experts": base64.b64encode(ROUTES.tobytes()).decode(),
        "weight_version": "00c0ffee:3",
    },
}


class Upstream:
    """Answers every path with `given` and counts."""

    def __init__(self) -> None:
        self.given = ANSWER
        self.bodies: list[bytes] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.json_response(self.given)

    async def start(self) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(application)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    server.thread.start()
    server.url = asyncio.run_coroutine_threadsafe(server.start(), server.loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(server.runner.cleanup(), server.loop).result(10)
    server.loop.call_soon_threadsafe(server.loop.stop)
    server.thread.join()
    server.loop.close()


@pytest.fixture(scope="module")
def proxy(upstream: Upstream) -> Iterator[FaultProxy]:
    with FaultProxy(upstream.url) as made:
        yield made


def post(proxy: FaultProxy, path: str = "/generate", timeout: float = 10.0) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("POST", path, body=b'{"input_ids":[1]}')
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_a_fault_the_answer_passes_unchanged(proxy, upstream):
    status, body = post(proxy)
    assert (status, json.loads(body)) == (200, ANSWER)
    assert upstream.bodies[-1] == b'{"input_ids":[1]}'


def expected(kind: str) -> dict:
    answer = json.loads(json.dumps(ANSWER))
    meta = answer["meta_info"]
    if kind == "wrong_lengths":
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:2]
    elif kind in ("nan", "positive"):
        meta["output_token_logprobs"][2][0] = math.nan if kind == "nan" else 0.5
    elif kind == "foreign_token":
        answer["output_ids"][2] = meta["output_token_logprobs"][2][1] = 1_000_000
    elif kind == "few_routes":
        meta["routed_experts"] = base64.b64encode(ROUTES[:8].tobytes()).decode()
    elif kind == "old_version":
        meta["weight_version"] = "another-life:0"
    return answer


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_a_change_befalls_one_answer_and_only_what_it_names(proxy, kind):
    proxy.add(Fault(kind))
    # compared as text: a NaN doesn't equal itself
    assert json.dumps(json.loads(post(proxy)[1])) == json.dumps(expected(kind))
    assert json.loads(post(proxy)[1]) == ANSWER and proxy.pending == 0


def without_tokens(name: str) -> tuple[dict, dict]:
    """An answer that has none, and one that has some, by what gives it."""
    if name == "abort":
        return {"output_ids": [], "meta_info": ANSWER["meta_info"] | {"output_token_logprobs": []}}, ANSWER
    choice = {"token_ids": [3], "logprobs": None, "weight_versions": [{"version": "00c0ffee:3"}]}
    content = [{"logprob": -0.1, "token_id": 3}]
    return {"choices": [choice]}, {"choices": [choice | {"logprobs": {"content": content}}]}


@pytest.mark.parametrize("name", ["abort", "vLLM's health check"])
def test_a_change_waits_for_an_answer_with_tokens(upstream, monkeypatch, name):
    bare, full = without_tokens(name)
    with FaultProxy(upstream.url, changes=CHANGES if name == "abort" else VLLM_CHANGES) as proxy:
        proxy.add(Fault("old_version", times=2))
        for answer, is_changed, pending in ((bare, 0, 2), (full, 1, 1), (bare, 0, 1), (full, 1, 0), (full, 0, 0)):
            monkeypatch.setattr(upstream, "given", answer)
            found = json.loads(post(proxy)[1])
            assert ("another-life" in json.dumps(found)) == (found != answer) == is_changed
            assert proxy.pending == pending


@pytest.mark.parametrize("kind, seen", [("refuse", 0), ("lost", 1), ("half", 1)])
def test_a_broken_connection(proxy, upstream, kind, seen):
    proxy.add(Fault(kind))
    before = len(upstream.bodies)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        post(proxy)
    assert len(upstream.bodies) - before == seen


def test_a_hang_keeps_the_request_from_the_server(proxy, upstream):
    proxy.add(Fault("hang"))
    before = len(upstream.bodies)
    with pytest.raises(TimeoutError):
        post(proxy, timeout=0.3)
    assert len(upstream.bodies) == before


def test_an_error_a_late_and_a_huge_answer(proxy):
    proxy.add(Fault("error"))
    assert post(proxy)[0] == 500
    proxy.add(Fault("late", seconds=0.3))
    began = time.monotonic()
    assert json.loads(post(proxy)[1]) == ANSWER
    assert time.monotonic() - began >= 0.3
    proxy.add(Fault("huge", size=2**20))
    assert len(post(proxy)[1]) == 2**20 + 2


def test_an_action_is_called_while_the_server_works(proxy):
    called = threading.Event()
    proxy.add(Fault("call", action=called.set))
    assert json.loads(post(proxy)[1]) == ANSWER
    assert called.wait(5)


def test_faults_wait_for_their_path_their_turn_and_their_count(proxy):
    proxy.add(Fault("error", path="/update", skip=1, times=2))
    statuses = [post(proxy, path)[0] for path in ("/generate", "/update_a", "/update_b", "/update_c", "/update_d")]
    assert statuses == [200, 200, 500, 500, 200]
    assert proxy.requests[-5:] == ["/generate", "/update_a", "/update_b", "/update_c", "/update_d"]


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="no fault 'typo'"):
        Fault("typo")
