"""A client of the servers in another process than the training thread's, for which it makes
requests.

It follows a `RolloutClient` as the clients of other ranks follow that of rank 0: it gets the
servers' states from there, and reports what its requests have found. So weight updates, health and
metrics are the same wherever a request is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from megatron_gspo.config import ServerConfig
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator
from megatron_gspo.rollout.server_engine.server_api import ServedModel, ServerAPI
from megatron_gspo.rollout.server_engine.server_clients import server_clients
from megatron_gspo.rollout.server_engine.server_pool import PoolState, ServerPool


@dataclass(frozen=True)
class ClientSettings:
    """What a client is made of; it can be pickled.

    urls: of the servers, in the order in which the client begins with them. config: with its part
    of `max_concurrent_requests`.
    """

    urls: tuple[str, ...]
    config: ServerConfig
    model: ServedModel
    api: ServerAPI


@dataclass(frozen=True)
class ServerReport:
    """What the requests to one server have found.

    busy: whether some are in flight. stale: whether one found other weights since the last report.
    fault: why it is down for this client alone, or "". last_response: in monotonic seconds.
    busy_seconds: with requests in flight, since the last report.
    """

    busy: bool
    stale: bool
    fault: str
    last_response: float
    busy_seconds: float


@dataclass(frozen=True)
class ClientReport:
    """What a client has found since its last report.

    servers: by URL ascending. counts: see `ResponseGenerator`.
    """

    servers: list[ServerReport]
    counts: dict[str, int]


class ClientElsewhere(Protocol):
    """A `FollowingClient` in another process. Everything runs in the event loop of the
    `RolloutClient`; a report is None if the process has ended."""

    async def open_client(self, settings: ClientSettings) -> None:
        """Make the client; once, before all else."""
        ...

    def follow(self, state: PoolState) -> None:
        """Have it follow; see `ResponseGenerator.follow_state`. Returns at once; what comes later
        finds the state."""
        ...

    async def pause(self) -> ClientReport | None:
        """See `ResponseGenerator.pause_requests`."""
        ...

    async def interrupt(self) -> ClientReport | None:
        """See `ResponseGenerator.interrupt_requests`."""
        ...

    async def report(self) -> ClientReport | None:
        """See `FollowingClient.take_report`."""
        ...


class FollowingClient(ResponseGenerator):
    """See the module. Made and used in one event loop. The `RolloutClient` logs its events."""

    def __init__(self, settings: ClientSettings, session: aiohttp.ClientSession) -> None:
        """session: is closed with the client."""
        self._session = session
        pool = ServerPool(
            server_clients(settings.urls, session, settings.config),
            settings.config,
            settings.api,
            owner=False,
        )
        super().__init__(pool, settings.model, settings.api, _no_text, settings.config)
        self._monitor = asyncio.ensure_future(pool.monitor())

    def take_report(self) -> ClientReport:
        """What it has found since the last report."""
        servers = self.pool.by_url
        reports = [
            ServerReport(
                busy=bool(server.tasks),
                stale=server.found_stale,
                fault="" if server.alive or server.down_for_all else server.reason,
                last_response=server.last_response,
                busy_seconds=seconds,
            )
            for server, seconds in zip(servers, self.pool.take_busy_seconds(), strict=True)
        ]
        for server in servers:
            server.found_stale = False
        counts = dict(self.counts)
        self.counts.clear()
        return ClientReport(reports, counts)

    async def close(self) -> None:
        """End its connections."""
        self._monitor.cancel()
        await self._session.close()


def _no_text(tokens: Sequence[int]) -> str:
    """Replies of agents are read from their tokens."""
    return ""
