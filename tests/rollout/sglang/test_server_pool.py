"""Who gets the next request, who is taken out, and who comes back. The servers are real ones of a few lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from megatron_gspo.rollout.sglang import server_pool as fleet_module
from megatron_gspo.rollout.sglang.server_pool import INCOMPLETE, Fleet, FleetSettings, Member
from megatron_gspo.servers.http_client import Server, open_session
from tests.servers.web_server import WebServer

NOW = "00c0ffee:3"


class Health:
    """A server that says `version` of its weights; `silent`: it takes requests and answers none, `paused`: no /health,
    `status`: of /health."""

    def __init__(self) -> None:
        self.version, self.silent, self.paused, self.status = NOW, False, False, 200
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
    monkeypatch.setattr(fleet_module, "_COOL_DOWN", 0.0)


def with_fleet(action: Callable[[Fleet], Awaitable[Any]], *urls: str, **settings: Any) -> Any:
    """What `action` gives with a fleet of these servers (three that nobody asks, without), all of which serve."""
    async def run() -> Any:
        session = await open_session()
        servers = [Server(url, session) for url in urls or [f"http://host:{i}" for i in (1, 2, 3)]]
        given = dict(max_requests=2, health_interval=0.01, health_timeout=20.0)
        fleet = Fleet(servers, FleetSettings(**{**given, **settings}))
        await fleet.set_version(NOW, fleet.members)
        try:
            return await action(fleet)
        finally:
            await session.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_go_where_fewest_tokens_are_outstanding():
    async def action(fleet: Fleet) -> None:
        async with AsyncExitStack() as stack:
            taken = [await stack.enter_async_context(fleet.use(cost)) for cost in (100, 10, 50, 30, 5)]
            places = [fleet.members.index(member) for member in taken]
            assert places == [0, 1, 2, 1, 2]  # the last finds two requests, the most, at the least loaded
            assert [m.outstanding for m in fleet.members] == [100, 40, 55]
            assert [m.requests for m in fleet.members] == [1, 2, 2]
        assert [m.outstanding for m in fleet.members] == [0, 0, 0] == [m.requests for m in fleet.members]

    with_fleet(action)


def test_a_failure_within_gives_the_tokens_back():
    async def action(fleet: Fleet) -> None:
        with pytest.raises(KeyError):
            async with fleet.use(100):
                raise KeyError
        assert fleet.members[0].outstanding == fleet.members[0].requests == 0

    with_fleet(action)


def test_affinity_holds_while_the_server_serves_and_has_room():
    async def action(fleet: Fleet) -> None:
        last = fleet.members[2]
        async with fleet.use(100, near=last) as first, fleet.use(100, near=last) as second:
            assert first is second is last
            async with fleet.use(1, near=last) as third:  # two are the most
                assert third is fleet.members[0]
        await fleet.lose(last, "gone")
        async with fleet.use(1, near=last) as found:
            assert found is fleet.members[0]

    with_fleet(action)


def test_who_finds_no_room_waits():
    async def action(fleet: Fleet) -> None:
        order: list[int] = []

        async def request(number: int, until: asyncio.Event) -> None:
            async with fleet.use(1):
                order.append(number)
                await until.wait()

        release = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(request(i, release[i])) for i in range(8)]
        await settle()
        assert order == [0, 1, 2, 3, 4, 5] and max(m.requests for m in fleet.members) == 2
        release[3].set()
        await settle()
        assert len(order) == 7
        tasks[7].cancel() if order[6] == 6 else tasks[6].cancel()
        for event in release:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(order) == 7 and all(m.requests == m.outstanding == 0 for m in fleet.members)

    with_fleet(action)


def test_nothing_begins_while_weights_move_or_nobody_serves():
    async def action(fleet: Fleet) -> None:
        async def request() -> Member:
            async with fleet.use(1) as member:
                return member

        await fleet.hold(True)
        task = asyncio.create_task(request())
        await settle()
        assert not task.done()
        await fleet.set_version("00c0ffee:4", ())
        await fleet.hold(False)
        await settle()
        assert not task.done() and fleet.serving == [] and fleet.stale == fleet.members
        await fleet.set_version("00c0ffee:4", fleet.members[1:2])
        assert await task is fleet.members[1]
        assert fleet.stale == [fleet.members[0], fleet.members[2]]

    with_fleet(action)


def test_a_lost_server_gives_its_requests_back():
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        task = asyncio.create_task(asyncio.sleep(60))
        member.tasks.add(task)
        await fleet.lose(member, "gone")
        await settle()
        assert task.cancelled() and not member.alive and member.version is None
        assert member not in fleet.serving + fleet.stale
        assert "http://host:1: gone" in fleet.describe() and "http://host:2: serves" in fleet.describe()

    with_fleet(action)


def test_four_failures_in_a_row_lose_a_server():
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        for _ in range(3):
            await fleet.blame(member, "wrong lengths")
        assert member.alive
        member.faults = 0  # an answer that was right
        for _ in range(3):
            await fleet.blame(member, "wrong lengths")
        assert member.alive
        await fleet.blame(member, "wrong lengths")
        assert not member.alive and member.reason == "4 requests in a row failed, the last: wrong lengths"

    with_fleet(action)


def test_a_distrusted_server_answers_and_does_not_serve():
    async def action(fleet: Fleet) -> None:
        await fleet.distrust(fleet.members[0], "other weights")
        assert fleet.stale == fleet.members[:1] and fleet.serving == fleet.members[1:]

    with_fleet(action)


def test_the_pause_of_a_lost_server_doubles_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(fleet_module, "_COOL_DOWN", 1.0)
    now = 1000.0
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: now)

    async def action(fleet: Fleet) -> None:
        member, pauses = fleet.members[0], []
        for _ in range(9):
            await fleet.lose(member, "gone")
            await fleet.lose(member, "still gone")  # counts once
            pauses.append(member.not_before - now)
            member.alive = True
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        member.losses = 5000  # a run of weeks
        await fleet.lose(member, "gone")
        assert member.not_before - now == 60

    with_fleet(action)


def test_a_server_that_nobody_listens_for_is_lost_at_once(health):
    url = health.server.url
    health.__exit__()

    async def action(fleet: Fleet) -> None:
        await fleet.look(fleet.members[0])
        assert not fleet.members[0].alive and not fleet.members[0].hangs
        assert "no connection" in fleet.members[0].reason

    with_fleet(action, url)
    health.__enter__()


def test_a_silent_server_is_lost_at_the_third_look_and_hangs(health):
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        health.silent = True
        await fleet.look(member)
        await fleet.look(member)
        assert member.alive
        health.silent = False
        await fleet.look(member)
        assert member.strikes == 0
        health.silent = True
        for _ in range(3):
            await fleet.look(member)
        assert not member.alive and member.hangs and "no answer within 0.4 s" in member.reason

    with_fleet(action, health.server.url, health_timeout=0.4)


def test_a_server_that_was_lost_for_its_requests_hangs_too_when_it_is_silent(health):
    """Its launcher has to hear of it whoever noticed first."""
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        health.silent = True
        for _ in range(4):
            await fleet.blame(member, "no answer")
        assert not member.alive and not member.hangs
        for _ in range(3):
            await fleet.look(member)
        assert member.hangs
        member.hangs = False  # it is started again
        await fleet.look(member)
        assert not member.hangs  # and has as much time as before
        health.silent = False
        await fleet.look(member)
        assert member.alive and member.version == NOW

    with_fleet(action, health.server.url, health_timeout=0.4)


def test_a_server_that_says_it_starts_does_not_hang(health):
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        await fleet.lose(member, "gone")
        health.status = 503
        for _ in range(8):
            await fleet.look(member)
        assert not member.alive and not member.hangs

    with_fleet(action, health.server.url)


def test_only_a_busy_server_is_asked_for_a_token(health):
    """/health generates one: it takes a second, and a paused server never answers it."""
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        health.paused = True
        for _ in range(4):
            await fleet.look(member)
        assert member.alive and "/health" not in health.asked
        member.tasks.add(asyncio.create_task(asyncio.sleep(60)))  # a request is under way: the scheduler may hang
        member.answered = time.monotonic() + 60  # but it has just answered another
        await fleet.look(member)
        assert member.alive and "/health" not in health.asked
        member.answered = 0.0
        for _ in range(3):
            await fleet.look(member)
        assert not member.alive and member.hangs

    with_fleet(action, health.server.url, health_timeout=0.4)


@pytest.mark.parametrize("said, serves", [(NOW, True), ("00c0ffee:2", False), ("default", False), (None, False),
                                          ([NOW], False)])
def test_what_comes_back_serves_only_with_the_current_weights(health, said, serves):
    async def action(fleet: Fleet) -> None:
        await fleet.lose(fleet.members[0], "gone")
        health.version = said
        await fleet.look(fleet.members[0])
        assert fleet.members[0].alive
        assert (fleet.serving == fleet.members, fleet.stale == fleet.members) == (serves, not serves)

    with_fleet(action, health.server.url)


def test_who_goes_and_who_comes_back_is_told_once(health):
    async def action(fleet: Fleet) -> None:
        member, said, lost = fleet.members[0], [], fleet.lose
        fleet._say = lambda line: said.append(line.removeprefix(f"{health.server.url} is "))
        for change in (lost, lost, None, fleet.distrust, fleet.distrust, lost, None, None):
            health.version = NOW if len(said) < 3 else "default"
            await (change(member, "gone") if change else fleet.look(member))
        doubted, waits = "out until it gets weights: gone", "back and waits for weights"
        assert said == ["out: gone", "back", doubted, "out: gone", waits]

    with_fleet(action, health.server.url)


def test_a_server_left_in_an_update_comes_back_for_another(health):
    """It is paused: it has no /health until an update of it succeeds."""
    async def action(fleet: Fleet) -> None:
        await fleet.lose(fleet.members[0], "gone")
        health.version, health.paused = NOW + INCOMPLETE, True
        await fleet.look(fleet.members[0])
        assert fleet.stale == fleet.members

    with_fleet(action, health.server.url)


def test_a_server_that_cools_down_or_takes_weights_is_left_alone(health, monkeypatch):
    monkeypatch.setattr(fleet_module, "_COOL_DOWN", 60.0)

    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        await fleet.lose(member, "gone")
        await fleet.look(member)
        assert not member.alive and not health.asked
        member.not_before = 0.0
        await fleet.hold(True)
        await fleet.look(member)
        assert not member.alive and not health.asked
        await fleet.hold(False)
        await fleet.look(member)
        assert member.alive

    with_fleet(action, health.server.url)


def test_silence_while_weights_move_counts_for_nothing(health):
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        health.silent = True
        look = asyncio.create_task(fleet.look(member))
        while not health.asked:
            await asyncio.sleep(0.001)
        await fleet.hold(True)
        await look
        assert member.strikes == 0

    with_fleet(action, health.server.url, health_timeout=0.4)


def test_one_question_tells_whether_a_server_can_take_weights(health):
    async def action(fleet: Fleet) -> None:
        member = fleet.members[0]
        await fleet.hold(True)
        health.paused = True
        assert await fleet.ask(member) is None and member.alive
        health.silent = True
        assert (await fleet.ask(member)).retry and not member.alive

    with_fleet(action, health.server.url, health_timeout=0.4)


def test_a_watch_of_several_waits_for_none(health):
    """One that is silent doesn't keep another from being looked at."""
    with Health() as other:
        async def action(fleet: Fleet) -> None:
            health.silent = True
            watch = asyncio.create_task(fleet.watch())
            while len(other.asked) < 5:
                await asyncio.sleep(0.005)
            assert len(health.asked) == 1
            watch.cancel()

        with_fleet(action, health.server.url, other.server.url)
