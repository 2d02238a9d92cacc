"""A rank's client of all servers: its requests, and its view of the servers' states.

Several ranks have a client, each for its share of the prompts. Rank 0's owns the servers' states
(`ServerPool`) and alone updates the servers; the others learn the states from it (`state`,
`follow`) and report to it what their requests found (`reports`, `record`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import EngineError, first_line
from megatron_gspo.rollout.server_engine.following_client import (
    ClientElsewhere,
    ClientReport,
    ClientSettings,
)
from megatron_gspo.rollout.server_engine.open_group import RESPONSES, GroupKind
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator
from megatron_gspo.rollout.server_engine.server_api import (
    RequestContext,
    ServedModel,
    ServerAPI,
)
from megatron_gspo.rollout.server_engine.server_clients import server_clients
from megatron_gspo.rollout.server_engine.server_pool import PooledServer, PoolState, ServerPool
from megatron_gspo.servers.http_client import EventLoop, ServerClient, ServerError, open_session
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_MEMORY_SECONDS = 120.0  # a server may take to release or restore its memory


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


class RolloutClient(ResponseGenerator):
    """See the module. The methods are called from the training thread; coroutines run in the event
    loop.

    loop: in which the coroutines run. memory_released: whether the servers have released their GPU
    memory, with the weights in it.
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
        processes: LocalServers | None = None,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        """Connect to the servers.

        Args:
            decode: token ids of a response to its text.
            share: number of this client, and of clients; the first one owns the servers' states,
                and each may use its part of `max_concurrent_requests`, at least one.
            processes: started servers, which the owner watches and `close` stops.
            log: takes a line for each event at the servers.

        Raises:
            ValueError: an invalid URL.
        """
        number, count = share
        limit = max(config.max_concurrent_requests // count, 1)
        start = number * len(urls) // count  # clients begin with different servers
        config = replace(config, max_concurrent_requests=limit)
        self.memory_released = False
        self._kinds: list[GroupKind] = []
        self._log = log
        self._owner = number == 0
        self._processes = processes
        self._settings = ClientSettings((*urls[start:], *urls[:start]), config, model, api)
        self._elsewhere: list[ClientElsewhere] = []
        self._told: PoolState | None = None
        self._busy_elsewhere = [0.0] * len(urls)
        self.loop = EventLoop()
        self.session = self.loop.run(open_session())
        pool = ServerPool(
            server_clients(self._settings.urls, self.session, config),
            config,
            api,
            owner=self._owner,
            processes=processes,
            log=log,
            changed=self._tell_elsewhere,
        )
        super().__init__(pool, model, api, decode, config)
        self._monitor = self._start_monitor()

    def stream(self, kind: GroupKind = RESPONSES) -> RequestStream:
        """A new stream of groups. kind: what a group is."""
        if kind not in self._kinds:
            self._kinds.append(kind)
            if kind.elsewhere is not None:
                self.loop.run(self._open_elsewhere(kind.elsewhere))
        return RequestStream(self, self.loop, kind)

    def pause(self) -> None:
        """See `pause_requests`."""
        self.loop.run(self.pause_requests())

    def interrupt(self) -> None:
        """See `interrupt_requests`."""
        self.loop.run(self.interrupt_requests())

    async def pause_requests(self) -> None:
        """See `ResponseGenerator.pause_requests`; elsewhere too."""
        await super().pause_requests()
        await self._take_reports([client.pause() for client in self._elsewhere])

    async def interrupt_requests(self) -> None:
        """See `ResponseGenerator.interrupt_requests`; elsewhere too."""
        await super().interrupt_requests()
        await self._take_reports([client.interrupt() for client in self._elsewhere])

    async def hear(self) -> None:
        """See `ResponseGenerator.hear`."""
        await self._take_reports([client.report() for client in self._elsewhere])

    def reports(self) -> np.ndarray:
        """[2, servers] int64, by URL ascending: whether requests are in flight, and whether one
        found other weights since the last call.

        Those of several clients are joined by their maximum. The owner's are zeros: its pool has
        the states.
        """

        async def read() -> np.ndarray:
            asked = time.monotonic()
            await self.hear()
            servers = self.pool.by_url
            busy = [bool(server.tasks) or server.busy_elsewhere_at >= asked for server in servers]
            stale = [server.found_stale for server in servers]
            for server in servers:
                server.found_stale = False
            reports = np.array([busy, stale], dtype=np.int64)
            return np.zeros_like(reports) if self._owner else reports

        return self.loop.run(read())

    def record(self, reports: np.ndarray) -> None:
        """Take the reports of all clients; on the owner."""

        async def mark() -> None:
            busy, stale = reports.tolist()
            for i, server in enumerate(self.pool.by_url):
                if busy[i]:
                    server.busy_elsewhere_at = time.monotonic()
                if stale[i]:
                    await self.pool.mark_stale(server, "it answered with other weights")

        self.loop.run(mark())

    def state(self) -> PoolState:
        """The owner's states of the servers."""

        async def read() -> PoolState:
            return self._state()

        return self.loop.run(read())

    def follow(self, state: PoolState) -> None:
        """Take over the owner's states, and start requests again."""

        self.loop.run(self.follow_state(replace(state, paused=False)))

    def take_counts(self) -> list[int]:
        """The number of each of `COUNTS` since the last call."""
        self.loop.run(self.hear())
        counts = [self.counts[name] for name in COUNTS]
        self.counts = Counter()
        return counts

    def take_busy_seconds(self) -> list[float]:
        """See `ServerPool.take_busy_seconds`. Elsewhere: up to the last `hear`."""

        async def take() -> list[float]:
            elsewhere = self._busy_elsewhere
            self._busy_elsewhere = [0.0] * len(elsewhere)
            here = self.pool.take_busy_seconds()
            return [max(seconds) for seconds in zip(here, elsewhere, strict=True)]

        return self.loop.run(take())

    def check_servers(self) -> None:
        """Before the first update, raise `EngineError` for a server whose responses the run can't
        use, or that refuses the run, for example a wrong key. One that does not answer is waited
        for later.
        """

        async def reason(server: PooledServer) -> str:
            try:
                info = await self.api.server_info(
                    server.client, timeout=self._config.update_timeout
                )
            except ServerError as error:
                if not error.retry:
                    raise
                return ""
            return info.unusable(routes=self.model.return_routes, colocated=self._config.colocated)

        async def reasons() -> list[str]:
            return await asyncio.gather(*map(reason, self.pool.servers))

        for server, refusal in zip(self.pool.servers, self.loop.run(reasons()), strict=True):
            if refusal:
                raise EngineError(f"server {server.url}: {refusal}")

    def wait_for_server(self, seconds: float) -> bool:
        """Whether a server responds within `seconds`."""
        deadline = time.monotonic() + seconds
        while not any(server.alive for server in self.pool.servers):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
        return True

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """By URL of each serving server: its log-probs (temperature 1) [L-1] of the tokens [L] of
        each sequence but the first. A server that fails is left out and counted as failed."""

        async def score_on(server: PooledServer) -> list[np.ndarray] | None:
            try:
                return [await self._score(server.client, tokens.tolist()) for tokens in sequences]
            except EngineError as error:
                await self.pool.mark_failed(server, str(error))
                return None

        async def score_on_all() -> dict[str, list[np.ndarray]]:
            servers = self.pool.serving
            scores = await asyncio.gather(*map(score_on, servers))
            return {
                server.url: values
                for server, values in zip(servers, scores, strict=True)
                if values is not None
            }

        return self.loop.run(score_on_all())

    def begin_update(
        self, wire_version: str, version: int, *, interrupts: bool
    ) -> list[PooledServer]:
        """The servers that can take new weights. interrupts: stop the requests, which continue
        under the new weights; else only servers that lack them are returned.

        wire_version: as servers report the (training) version. Raises `ServerError` if waiting
        cannot help: a wrong key, or no inference server.
        """
        if interrupts:
            self.interrupt()
            self.loop.run(self.pool.set_version(wire_version, ()))
            self.current_version = version
        targets = self.loop.run(self._responding()) if interrupts else self.pool.stale
        if self.memory_released:
            self._restore_memory("weights")
        return targets

    def end_update(
        self, targets: Sequence[PooledServer], failures: Mapping[str, ServerError]
    ) -> None:
        """Serve the new weights. failures: by URL; these servers get no requests until an update
        succeeds.
        """
        if self.memory_released:
            self._restore_memory("kv_cache")
            self.memory_released = False
        self.loop.run(self._apply_update(targets, failures))
        self.resume()

    def resume(self) -> None:
        """Start requests again."""
        self.loop.run(self.pool.resume())

    def release_memory(self) -> None:
        """Interrupt generation and have the servers release their GPU memory; the next update
        restores it.
        """
        self.interrupt()
        if self.memory_released:
            return
        # A server that is not idle fails on the release.
        self.loop.run(self.pool.wait_for_checks())
        self._on_all_servers(
            lambda server: self.api.release_memory(server, timeout=_MEMORY_SECONDS)
        )
        self.memory_released = True

    def _restore_memory(self, tag: str) -> None:
        self._on_all_servers(
            lambda server: self.api.restore_memory(server, tag, timeout=_MEMORY_SECONDS)
        )

    def _on_all_servers(self, command: Callable[[ServerClient], Awaitable[None]]) -> None:
        async def run() -> None:
            for server in [server for server in self.pool.servers if server.alive]:
                try:
                    await command(server.client)
                except ServerError as error:
                    await self.pool.mark_down(server, str(error))

        self.loop.run(run())

    async def _score(self, server: ServerClient, tokens: Sequence[int]) -> np.ndarray:
        """[len(tokens) - 1] float32: a server's log-probs (temperature 1) of tokens[1:]."""
        context = RequestContext(f"log-prob check at {server.url}", len(tokens), 1, self._text_only)
        request = self.api.score_request(list(tokens), context)
        body = await server.post_for_bytes(
            request.path,
            request.body,
            timeout=self._config.request_timeout,
            max_bytes=request.max_bytes,
        )
        return self.api.responses.parse_input_scores(body, context, tokens).log_probs

    async def _responding(self) -> list[PooledServer]:
        """Servers that can take weights now. One that does not respond would delay the update by
        its timeout.
        """
        servers = [server for server in self.pool.servers if server.alive]
        faults = await asyncio.gather(*(self.pool.ping(server) for server in servers))
        final = [fault for fault in faults if fault is not None and not fault.retry]
        if servers and len(final) == len(servers):
            raise final[0]
        return [server for server, fault in zip(servers, faults, strict=True) if fault is None]

    async def _apply_update(
        self, targets: Sequence[PooledServer], failures: Mapping[str, ServerError]
    ) -> None:
        version = self.pool.version
        assert version is not None
        for server in targets:
            if (error := failures.get(server.url)) is not None:
                reason = first_line(error)
                await self.pool.mark_stale(server, reason)
                self._log(f"weights {version.partition(':')[2]}: {reason}")
                await self.pool.ping(server)
        updated = [server for server in targets if server.url not in failures and server.alive]
        await self.pool.set_version(version, updated)

    def _start_monitor(self) -> Future:
        """Watch the servers until `close`."""
        return self.loop.spawn(self.pool.monitor())

    def _state(self) -> PoolState:
        return PoolState(
            self.pool.version, self.current_version, self.pool.states(), self.pool.paused
        )

    async def _open_elsewhere(self, client: ClientElsewhere) -> None:
        await client.open_client(self._settings)
        self._elsewhere.append(client)
        client.follow(self._state())

    def _tell_elsewhere(self) -> None:
        """The pool has changed."""
        if not self._elsewhere:
            return
        state = self._state()
        if state != self._told:
            self._told = state
            for client in self._elsewhere:
                client.follow(state)

    async def _take_reports(self, asked: Sequence[Awaitable[ClientReport | None]]) -> None:
        for report in await asyncio.gather(*asked):
            if report is not None:
                await self._take_report(report)

    async def _take_report(self, report: ClientReport) -> None:
        """Treat what a client elsewhere has found as if this one had."""
        now = time.monotonic()
        reports = zip(self.pool.by_url, report.servers, strict=True)
        for i, (server, found) in enumerate(reports):
            self._busy_elsewhere[i] += found.busy_seconds
            server.last_response = max(server.last_response, found.last_response)
            if found.busy:
                server.busy_elsewhere_at = now
            if found.stale:
                await self.pool.mark_stale(server, "it answered with other weights")
            if found.fault and server.alive:
                await self.pool.mark_down(server, found.fault)
        self.counts.update(report.counts)

    def close(self) -> None:
        """End the requests, and stop the started servers. May be called again."""
        self._monitor.cancel()
        if not self.session.closed:
            for kind in self._kinds:
                self.loop.run(kind.close())
            self.loop.run(self.session.close())
        self.loop.close()
        if self._processes is not None:
            self._processes.stop()
            self._processes = None


def server_metrics(
    counts: Sequence[float], busy_seconds: Sequence[float], serving: int
) -> dict[str, float]:
    """The counts of all clients, the busy seconds of each server and the number of serving servers,
    by the names of docs/metrics.md.
    """
    counted = dict(zip(COUNTS, map(float, counts), strict=True))
    sent = counted.pop("input_tokens")
    cached = counted.pop("cached_tokens")
    return {f"rollout/{name}": value for name, value in counted.items()} | {
        "rollout/cached_share": cached / sent if sent else 0.0,
        "time/servers_busy": sum(busy_seconds) / len(busy_seconds),
        "rollout/servers": float(serving),
    }
