"""Which server gets the next request, is removed or returns. The servers are small real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_gspo.config import ServerConfig
from megatron_gspo.rollout.server_engine import server_pool as pool_module
from megatron_gspo.rollout.server_engine.server_pool import INCOMPLETE, PooledServer, ServerPool
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import ServerClient, open_session
from tests.servers.web_server import WebServer

NOW = "00c0ffee:3"


class Health:
    """A server with `version` of its weights; `silent`: it takes requests and answers none,
    `paused`: no /health, `status`: of /health."""

    def __init__(self) -> None:
        self.version = NOW
        self.silent = False
        self.paused = False
        self.status = 200
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.silent or (self.paused and request.path == "/health"):
            await self.server.hang()
        if request.path == "/health":
            return web.Response(status=self.status)
        return web.json_response({"weight_version": self.version})

    def __enter__(self) -> Health:
        self.server = WebServer(self.answer)
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()


@pytest.fixture
def health() -> Iterator[Health]:
    with Health() as made:
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_COOL_DOWN_SECONDS", 0.0)


def with_pool(action: Callable[[ServerPool], Awaitable[Any]], *urls: str, **settings: Any) -> Any:
    """What `action` gives with a pool of these servers (without any: three that get no
    request), all of which serve.
    """

    async def run() -> Any:
        session = await open_session()
        servers = [
            ServerClient(url, session) for url in urls or [f"http://host:{i}" for i in (1, 2, 3)]
        ]
        given = dict(max_concurrent_requests=2, health_interval=0.01, health_timeout=20.0)
        pool = ServerPool(servers, ServerConfig(**{**given, **settings}), SGLangAPI())
        await pool.set_version(NOW, pool.servers)
        try:
            return await action(pool)
        finally:
            await session.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def set_patience(pool: ServerPool, seconds: float) -> None:
    """How long a check waits from now on: little for a silent server, long for one that answers."""
    pool._config = replace(pool._config, health_timeout=seconds)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_go_where_fewest_tokens_are_outstanding():
    async def action(pool: ServerPool) -> None:
        async with AsyncExitStack() as stack:
            taken = [
                await stack.enter_async_context(pool.acquire(cost)) for cost in (100, 10, 50, 30, 5)
            ]
            chosen = [pool.servers.index(member) for member in taken]
            # The last finds two requests, the most, at the least loaded.
            assert chosen == [0, 1, 2, 1, 2]
            assert [m.outstanding_tokens for m in pool.servers] == [100, 40, 55]
            assert [m.num_requests for m in pool.servers] == [1, 2, 2]
        assert (
            [m.outstanding_tokens for m in pool.servers]
            == [0, 0, 0]
            == [m.num_requests for m in pool.servers]
        )

    with_pool(action)


def test_a_server_is_busy_while_it_has_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now[0])

    async def action(pool: ServerPool) -> list[list[float]]:
        taken = []
        async with pool.acquire(1):  # at the first server
            now[0] += 2.0
            async with pool.acquire(1):  # at the second
                now[0] += 3.0
            async with pool.acquire(1, preferred=pool.servers[0]):
                now[0] += 1.0
                taken.append(pool.take_busy_seconds())
                now[0] += 5.0
        now[0] += 7.0
        return [*taken, pool.take_busy_seconds(), pool.take_busy_seconds()]

    assert with_pool(action) == [[6.0, 3.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_affinity_holds_while_the_server_serves_and_has_room():
    async def action(pool: ServerPool) -> None:
        last = pool.servers[2]
        async with (
            pool.acquire(100, preferred=last) as first,
            pool.acquire(100, preferred=last) as second,
        ):
            assert first is second is last
            async with pool.acquire(1, preferred=last) as third:  # two are the most
                assert third is pool.servers[0]
        await pool.mark_down(last, "gone")
        async with pool.acquire(1, preferred=last) as other:
            assert other is pool.servers[0]

    with_pool(action)


def test_who_finds_no_room_waits():
    async def action(pool: ServerPool) -> None:
        order: list[int] = []

        async def request(number: int, until: asyncio.Event) -> None:
            async with pool.acquire(1):
                order.append(number)
                await until.wait()

        release = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(request(i, release[i])) for i in range(8)]
        await settle()
        assert order == [0, 1, 2, 3, 4, 5] and max(m.num_requests for m in pool.servers) == 2
        release[3].set()
        await settle()
        assert len(order) == 7
        tasks[7].cancel() if order[6] == 6 else tasks[6].cancel()
        for event in release:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(order) == 7
        assert all(m.num_requests == m.outstanding_tokens == 0 for m in pool.servers)

    with_pool(action)


def test_nothing_begins_while_weights_move_or_nobody_serves():
    async def action(pool: ServerPool) -> None:
        async def request() -> PooledServer:
            async with pool.acquire(1) as member:
                return member

        await pool.pause()
        task = asyncio.create_task(request())
        await settle()
        assert not task.done()
        await pool.set_version("00c0ffee:4", ())
        await pool.resume()
        await settle()
        assert not task.done() and pool.serving == [] and pool.stale == pool.servers
        await pool.set_version("00c0ffee:4", pool.servers[1:2])
        assert await task is pool.servers[1]
        assert pool.stale == [pool.servers[0], pool.servers[2]]

    with_pool(action)


def test_a_lost_server_gives_its_requests_back():
    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        task = asyncio.create_task(asyncio.sleep(60))
        member.tasks.add(task)
        await pool.mark_down(member, "gone")
        await settle()
        assert task.cancelled() and not member.alive and member.version is None
        assert member not in pool.serving + pool.stale
        assert "http://host:1: gone" in pool.describe()
        assert "http://host:2: serves" in pool.describe()

    with_pool(action)


def test_a_server_that_nobody_listens_for_is_lost_at_once(health):
    url = health.server.url
    health.__exit__()

    async def action(pool: ServerPool) -> None:
        await pool.health_check(pool.servers[0])
        assert not pool.servers[0].alive and not pool.servers[0].unresponsive
        assert "no connection" in pool.servers[0].reason

    with_pool(action, url)
    health.__enter__()


def test_a_silent_server_is_lost_at_the_third_look_and_hangs(health):
    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        health.silent = True
        set_patience(pool, 0.4)
        await pool.health_check(member)
        await pool.health_check(member)
        assert member.alive
        health.silent = False
        set_patience(pool, 20.0)
        await pool.health_check(member)
        assert member.missed_checks == 0
        health.silent = True
        set_patience(pool, 0.4)
        for _ in range(3):
            await pool.health_check(member)
        assert not member.alive
        assert member.unresponsive
        assert "no answer within 0.4 s" in member.reason

    with_pool(action, health.server.url)


def test_a_server_that_was_lost_for_its_requests_hangs_too_when_it_is_silent(health):
    """Its launcher is notified, whether a request or a health check found it first."""

    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        health.silent = True
        for _ in range(4):
            await pool.mark_failed(member, "no answer")
        assert not member.alive and not member.unresponsive
        set_patience(pool, 0.4)
        for _ in range(3):
            await pool.health_check(member)
        assert member.unresponsive
        member.unresponsive = False  # it is started again
        await pool.health_check(member)
        assert not member.unresponsive  # and has as much time as before
        health.silent = False
        set_patience(pool, 20.0)
        await pool.health_check(member)
        assert member.alive and member.version == NOW

    with_pool(action, health.server.url)


def test_a_server_that_says_it_starts_does_not_hang(health):
    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        await pool.mark_down(member, "gone")
        health.status = 503
        for _ in range(8):
            await pool.health_check(member)
        assert not member.alive and not member.unresponsive

    with_pool(action, health.server.url)


def test_only_a_busy_server_is_asked_for_a_token(health):
    """/health generates one: it takes a second, and a paused server never answers it."""

    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        health.paused = True
        for _ in range(4):
            await pool.health_check(member)
        assert member.alive and "/health" not in health.asked
        # A request is under way: the scheduler may hang.
        member.tasks.add(asyncio.create_task(asyncio.sleep(60)))
        member.last_response = time.monotonic() + 60  # but it has just answered another
        await pool.health_check(member)
        assert member.alive and "/health" not in health.asked
        member.last_response = 0.0
        set_patience(pool, 0.4)
        for _ in range(3):
            await pool.health_check(member)
        assert not member.alive and member.unresponsive

    with_pool(action, health.server.url)


def test_a_server_that_other_clients_use_must_generate_for_its_check_while_they_report_it(health):
    async def action(pool: ServerPool) -> None:
        [member] = pool.servers
        for age, generates in ((0.0, True), (3600.0, False)):
            health.asked.clear()
            member.busy_elsewhere_at = time.monotonic() - age
            await pool.health_check(member)
            assert ("/health" in health.asked) == generates
            assert ("/model_info" in health.asked) != generates

    with_pool(action, health.server.url)


@pytest.mark.parametrize(
    "said, serves",
    [(NOW, True), ("00c0ffee:2", False), ("default", False), (None, False), ([NOW], False)],
)
def test_what_comes_back_serves_only_with_the_current_weights(health, said, serves):
    async def action(pool: ServerPool) -> None:
        await pool.mark_down(pool.servers[0], "gone")
        health.version = said
        await pool.health_check(pool.servers[0])
        assert pool.servers[0].alive
        assert (pool.serving == pool.servers, pool.stale == pool.servers) == (serves, not serves)

    with_pool(action, health.server.url)


def test_a_server_left_in_an_update_comes_back_for_another(health):
    """It is paused: it has no /health until an update of it succeeds."""

    async def action(pool: ServerPool) -> None:
        await pool.mark_down(pool.servers[0], "gone")
        health.version = NOW + INCOMPLETE
        health.paused = True
        await pool.health_check(pool.servers[0])
        assert pool.stale == pool.servers

    with_pool(action, health.server.url)


def test_a_server_that_cools_down_or_takes_weights_is_left_alone(health, monkeypatch):
    monkeypatch.setattr(pool_module, "_COOL_DOWN_SECONDS", 60.0)

    async def action(pool: ServerPool) -> None:
        member = pool.servers[0]
        await pool.mark_down(member, "gone")
        await pool.health_check(member)
        assert not member.alive and not health.asked
        member.check_after = 0.0
        await pool.pause()
        await pool.health_check(member)
        assert not member.alive and not health.asked
        await pool.resume()
        await pool.health_check(member)
        assert member.alive

    with_pool(action, health.server.url)
