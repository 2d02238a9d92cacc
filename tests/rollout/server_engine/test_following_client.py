"""A client in another process: what it follows, and what it reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import ServerConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.server_engine.following_client import (
    ClientReport,
    ClientSettings,
    FollowingClient,
    ServerReport,
)
from megatron_gspo.rollout.server_engine.open_group import ResponseGroups
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.rollout_client import COUNTS
from megatron_gspo.rollout.server_engine.server_pool import PoolState, ServerState
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import open_session
from tests.support.sglang_generator import MODEL, SAMPLING, VERSION, Generator, Setup

IDLE = ServerReport(busy=False, stale=False, fault="", last_response=0.0, busy_seconds=0.0)


def test_it_follows_and_reports(server: Generator, short_pauses: None) -> None:
    serving = PoolState(VERSION, 3, {server.url: ServerState(alive=True, has_weights=True)})

    async def follow() -> None:
        config = ServerConfig(retries=0, request_timeout=10.0)
        settings = ClientSettings((server.url,), config, MODEL, SGLangAPI())
        client = FollowingClient(settings, await open_session())
        response = PartialResponse(Prompt(0, np.arange(2, 7), ""), 0, 4)
        waiting = asyncio.ensure_future(client.generate(response, SAMPLING, 0, None))
        await client.follow_state(replace(serving, paused=True))
        await asyncio.sleep(0.1)
        assert client.pool.paused_seconds > 0.05, "the clock of a run stands still"
        assert not server.bodies
        await client.follow_state(serving)
        await waiting
        assert response.versions == [3]
        [report] = client.take_report().servers
        assert report.busy_seconds > 0 and report.last_response > 0
        assert client.take_report().counts == {}

        server.version = "00c0ffee:4"
        with pytest.raises(Exception, match="instead of"):
            response.reset()
            await client.generate(response, SAMPLING, 0, None)
        report = client.take_report()
        assert [found.stale for found in report.servers] == [True]
        assert report.counts["stale_responses"] == 1
        assert not client.pool.serving

        await client.follow_state(replace(serving, version=server.version, training_version=4))
        await client.pool.mark_down(client.pool.servers[0], "it is gone")
        assert [found.fault for found in client.take_report().servers] == ["it is gone"]
        down = {server.url: ServerState(alive=False, has_weights=False, reason="it is gone")}
        await client.follow_state(replace(serving, servers=down))
        assert [found.fault for found in client.take_report().servers] == [""], "all know it"
        await client.close()

    asyncio.run(follow())


class Elsewhere:
    """A client whose reports a test writes. told: what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.next = ClientReport([IDLE], {})

    async def open_client(self, settings: ClientSettings) -> None:
        self.told.append(settings)

    def follow(self, state: PoolState) -> None:
        self.told.append(state)

    async def pause(self) -> ClientReport:
        self.told.append("pause")
        return await self.report()

    async def interrupt(self) -> ClientReport:
        self.told.append("interrupt")
        return await self.report()

    async def report(self) -> ClientReport:
        report = self.next
        self.next = ClientReport([IDLE], {})
        return report


class Groups(ResponseGroups):
    def __init__(self, elsewhere: Elsewhere) -> None:
        self.elsewhere = elsewhere  # type: ignore[assignment]


def test_what_is_found_elsewhere_is_found_by_the_client(server: Generator) -> None:
    with Setup(server.url) as setup:
        client = setup.client
        elsewhere = Elsewhere()
        stream = client.stream(Groups(elsewhere))
        client.stream(Groups(Elsewhere()))
        settings, state = elsewhere.told
        assert settings == ClientSettings((server.url,), client._config, MODEL, client.api)
        serving = PoolState(VERSION, 3, {server.url: ServerState(True, True)})
        assert state == serving

        elsewhere.told.clear()
        client.interrupt()
        assert elsewhere.told == [replace(serving, paused=True), "pause", "interrupt"]
        client.resume()
        assert elsewhere.told[-1] == serving

        found = replace(IDLE, busy=True, last_response=1e12, busy_seconds=2.5)
        elsewhere.next = ClientReport([found], {"requests": 3})
        assert client.take_counts()[COUNTS.index("requests")] == 3
        assert client.take_busy_seconds() == [2.5] and client.take_busy_seconds()[0] < 2.5
        [pooled] = client.pool.servers
        assert pooled.last_response == 1e12 and pooled.busy_elsewhere_at > 0

        elsewhere.next = ClientReport([replace(IDLE, stale=True)], {})
        stream.progress()
        assert client.pool.stale == [pooled]
        assert elsewhere.told[-1].servers[server.url].has_weights is False
        elsewhere.next = ClientReport([replace(IDLE, fault="it is gone")], {})
        stream.progress()
        assert (pooled.alive, pooled.reason) == (False, "it is gone")
        assert elsewhere.told[-1].servers[server.url].alive is False
