"""A rank's client of all servers: its connections, its requests, and its view of the servers'
states.

Several ranks have one, each for its share of the prompts. Rank 0's owns the servers' states
(`ServerPool`); the others learn them from it (`state`, `follow`) and report to it what their
requests found (`reports`, `record`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import first_line
from megatron_gspo.rollout.server_engine.generation_client import GenerationClient
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_engine.server_api import ServedModel, ServerAPI
from megatron_gspo.rollout.server_engine.server_pool import ServerPool, ServerState
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.servers.server_launch import read_api_key

COUNTS = (
    "requests",
    "retries",
    "refused",
    "stale_responses",
    "continued",
    "discarded_tokens",
    "input_tokens",
    "cached_tokens",
)
"""Events that `RolloutClient.take_counts` counts."""


@dataclass(frozen=True)
class PoolState:
    """Sent by rank 0 to the other clients.

    version: as the servers report it; training_version: of the same weights.
    """

    version: str | None
    training_version: int
    servers: dict[str, ServerState]


class RolloutClient:
    """See the module. The methods are called from the training thread; requests run in an event
    loop.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: ServerConfig,
        model: ServedModel,
        decode: Callable[[list[int]], str],
        *,
        api: ServerAPI,
        share: tuple[int, int] = (0, 1),
        log: Callable[[str], None] = print,
    ) -> None:
        """decode: token ids of a response to its text. share: number of this client, and of
        clients; the first one owns the servers' states, and each may use its part of
        `max_concurrent_requests`, at least one. log: takes a line for each server that this client
        removes.

        Raises ValueError for an invalid URL.
        """
        number, count = share
        limit = max(config.max_concurrent_requests // count, 1)
        start = number * len(urls) // count  # clients begin with different servers
        self.model, self._decode, self._log = model, decode, log
        self._owner, self._recovery_timeout = number == 0, config.recovery_timeout
        self.loop = EventLoop()
        self.session = self.loop.run(open_session())
        key = read_api_key(config)
        servers = [
            ServerClient(url, self.session, api_key=key) for url in [*urls[start:], *urls[:start]]
        ]
        own = replace(config, max_concurrent_requests=limit)
        self.pool = ServerPool(servers, own, api, owner=self._owner, log=log)
        self.requests = GenerationClient(self.pool, model, own, api)
        self._monitor = self.watch(self.pool.monitor())

    def stream(self) -> RequestStream:
        """A new stream of groups."""
        return RequestStream(
            self.loop, self.requests, self._decode, recovery_timeout=self._recovery_timeout
        )

    def pause(self) -> None:
        """See `GenerationClient.pause`."""
        self.loop.run(self.requests.pause())

    def interrupt(self) -> None:
        """See `GenerationClient.interrupt`; the other clients are paused."""
        self.loop.run(self.requests.interrupt())

    def reports(self) -> np.ndarray:
        """[2, servers] int64, by URL ascending: whether requests are in flight, and whether one
        found other weights since the last call.

        Those of several clients are joined by their maximum. The owner's are zeros: its pool has
        the states.
        """

        async def take() -> np.ndarray:
            servers = sorted(self.pool.servers, key=lambda server: server.url)
            found = np.array(
                [[bool(s.tasks) for s in servers], [s.found_stale for s in servers]], dtype=np.int64
            )
            for server in servers:
                server.found_stale = False
            return found * (not self._owner)

        return self.loop.run(take())

    def record(self, reports: np.ndarray) -> None:
        """Take the reports of all clients; on the owner."""

        async def take() -> None:
            busy, stale = reports.tolist()
            for i, server in enumerate(sorted(self.pool.servers, key=lambda server: server.url)):
                if busy[i]:
                    server.busy_elsewhere_at = time.monotonic()
                if stale[i]:
                    await self.pool.mark_stale(server, "it answered with other weights")

        self.loop.run(take())

    def state(self) -> PoolState:
        """The owner's states of the servers."""

        async def read() -> PoolState:
            return PoolState(self.pool.version, self.requests.current_version, self.pool.states())

        return self.loop.run(read())

    def follow(self, state: PoolState) -> None:
        """Take over the owner's states, and start requests again."""

        async def take() -> None:
            self.requests.current_version = state.training_version
            await self.pool.follow(state.version, state.servers)
            await self.pool.resume()

        self.loop.run(take())

    def take_counts(self) -> list[int]:
        """The number of each of `COUNTS` since the last call."""
        counts, self.requests.counts = self.requests.counts, type(self.requests.counts)()
        return [counts[name] for name in COUNTS]

    def watch(self, monitor: Coroutine[Any, Any, Any]) -> Future:
        """Run a monitor until it is cancelled.

        An end by a bug, which would go unnoticed, is logged.
        """

        def report(ended: Future) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                reason = f"{type(error).__name__}: {first_line(error)}"
                self._log(
                    f"the servers are no longer monitored ({reason}): stop the run and start it"
                    " again"
                )

        future = self.loop.spawn(monitor)
        future.add_done_callback(report)
        return future

    def close(self) -> None:
        """End the requests. May be called again."""
        self._monitor.cancel()
        if not self.session.closed:
            self.loop.run(self.session.close())
        self.loop.close()


def server_metrics(counts: Sequence[float], serving: int) -> dict[str, float]:
    """The counts of all clients and the number of serving servers, by the names of
    docs/metrics.md.
    """
    found = dict(zip(COUNTS, map(float, counts), strict=True))
    sent, cached = found.pop("input_tokens"), found.pop("cached_tokens")
    return {f"rollout/{name}": value for name, value in found.items()} | {
        "rollout/cached_share": cached / sent if sent else 0.0,
        "rollout/servers": float(serving),
    }
