"""The servers of a run: which of them may get requests, their load, and which are removed and
return.

A server may get requests while it responds (`alive`) and has the current weights (`version`).
Everything here runs in one event loop, so no locks are needed.

With several clients each has a pool. Rank 0's is the owner: it checks the servers' health and knows
their weights; the others `follow` it. A follower checks only servers that it alone fails to reach,
which then serve the other clients.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import EngineError, first_line
from megatron_gspo.rollout.server_engine.server_api import ServerAPI
from megatron_gspo.servers.http_client import ServerClient, ServerError
from megatron_gspo.servers.server_processes import LocalServers

# Ends the version of a server during an update, or after a failed one: it is paused.
INCOMPLETE = ":incomplete"
_PROCESS_POLL_SECONDS = 0.5
_MAX_MISSED_CHECKS = 3  # health checks in a row
_MAX_FAILED_REQUESTS = 4  # in a row at one server
# Before a removed server is checked again, doubling.
_COOL_DOWN_SECONDS = 1.0
_MAX_COOL_DOWN_SECONDS = 60.0
_MAX_DOUBLINGS = 6
# So long a report of another client holds; while groups are awaited they come more often.
_REPORT_SECONDS = 2.0


class NoServerError(EngineError):
    """No server can generate; one line with the state of each."""


@dataclass(frozen=True)
class ServerState:
    """What the owner of a server says of it to the other clients."""

    alive: bool
    has_weights: bool
    reason: str = ""
    """Why it is down."""


@dataclass(frozen=True)
class PoolState:
    """What one client says of its pool to another, which follows it."""

    version: str | None
    """Version of the weights, as the servers report it."""

    training_version: int
    """Version of the same weights, as the trainer counts them."""

    servers: dict[str, ServerState]

    paused: bool = False
    """Whether no request may start."""


@dataclass
class PooledServer:
    """A server and its state."""

    client: ServerClient
    alive: bool = True
    """Whether it responded last."""

    version: str | None = None
    """Version of its weights, None while unknown or half updated."""

    outstanding_tokens: int = 0
    """Tokens of the requests in flight."""

    num_requests: int = 0
    """Number of requests in flight."""

    busy_seconds: float = 0.0
    """With requests in flight, since `take_busy_seconds`, up to the last time it had none."""

    busy_since: float = 0.0
    """When it last had none, or `take_busy_seconds` was called, in monotonic seconds."""

    missed_checks: int = 0
    """Health checks in a row that it missed."""

    failed_requests: int = 0
    """Requests in a row that failed."""

    times_down: int = 0
    """How often it went down since its last valid response."""

    unresponsive: bool = False
    """Whether it is down, accepts connections and does not respond."""

    reason: str = ""
    """Why it is down."""

    check_after: float = 0.0
    """No health check before this time, in monotonic seconds."""

    last_response: float = 0.0
    """When it last responded to a request, in monotonic seconds."""

    tasks: set[asyncio.Task] = field(default_factory=set)
    """The requests in flight."""

    busy_elsewhere_at: float = -math.inf
    """When another client last reported requests in flight, in monotonic seconds."""

    found_stale: bool = False
    """Whether a response had other weights, which the owner does not know yet."""

    down_for_all: bool = False
    """Whether it is down for the owner."""

    @property
    def url(self) -> str:
        return self.client.url


class ServerPool:
    """See the module. `version`: weight version that responses must have; None before the first
    update.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        config: ServerConfig,
        api: ServerAPI,
        *,
        owner: bool = True,
        processes: LocalServers | None = None,
        log: Callable[[str], None] = lambda line: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """A pool of servers that are all taken to be up.

        Args:
            owner: whether this client decides about the servers' states; else it follows another.
            processes: started servers, which `monitor` watches too.
            log: takes a line for each server that is removed or returns.
            changed: is called after a change of what `states`, `version` or `paused` say.
        """
        self.servers = [PooledServer(client) for client in clients]
        self.version: str | None = None
        self.paused = False  # no request starts during a weight update
        self._paused_since = 0.0  # monotonic seconds
        self._earlier_pauses = 0.0  # seconds
        self._config = config
        self._api = api
        self._owner = owner
        self._processes = processes
        self._log = log
        self._tell_change = changed
        self._checks_running = 0
        self._changed = asyncio.Condition()

    @property
    def by_url(self) -> list[PooledServer]:
        """The servers by URL ascending, the order of all reports: it is the same for every client,
        that of `servers` is not.
        """
        return sorted(self.servers, key=lambda server: server.url)

    @property
    def serving(self) -> list[PooledServer]:
        """Servers that may get requests."""
        return [
            server
            for server in self.servers
            if server.alive and server.version is not None and server.version == self.version
        ]

    @property
    def stale(self) -> list[PooledServer]:
        """Servers that respond and do not have the current weights."""
        return [
            server
            for server in self.servers
            if server.alive and (server.version is None or server.version != self.version)
        ]

    @property
    def paused_seconds(self) -> float:
        """Seconds in which no request could start because of the trainer, up to now."""
        current = time.monotonic() - self._paused_since if self.paused else 0.0
        return self._earlier_pauses + current

    def describe(self) -> str:
        """The state of each server, in one line."""
        stale = self.stale
        states = []
        for server in self.servers:
            state = "lacks the weights" if server in stale else "serves"
            states.append(f"{server.url}: {server.reason or state}")
        return "; ".join(states)

    @asynccontextmanager
    async def acquire(
        self, cost: int, *, preferred: PooledServer | None = None
    ) -> AsyncIterator[PooledServer]:
        """A server for a request of `cost` tokens: `preferred` if it serves, else the one with the
        least load.

        Waits while none has capacity. Safe to cancel.
        """
        server = await self._select(preferred)
        server.outstanding_tokens += cost
        if not server.num_requests:
            server.busy_since = time.monotonic()
        server.num_requests += 1
        try:
            yield server
        finally:
            server.outstanding_tokens -= cost
            server.num_requests -= 1
            if not server.num_requests:
                server.busy_seconds += time.monotonic() - server.busy_since
            async with self._changed:
                self._changed.notify()  # one slot, for one of possibly thousands of waiters

    def take_busy_seconds(self) -> list[float]:
        """Seconds with requests of this client in flight at each server, by URL ascending, since
        the last call."""
        now = time.monotonic()
        taken = []
        for server in self.by_url:
            current = now - server.busy_since if server.num_requests else 0.0
            taken.append(server.busy_seconds + current)
            server.busy_seconds = 0.0
            server.busy_since = now
        return taken

    async def _select(self, preferred: PooledServer | None) -> PooledServer:
        async with self._changed:
            while True:
                limit = self._config.max_concurrent_requests
                free = [server for server in self.serving if server.num_requests < limit]
                if not self.paused and preferred in free:
                    return preferred
                if not self.paused and free:
                    return min(free, key=lambda server: server.outstanding_tokens)
                await self._changed.wait()

    async def notify(self) -> None:
        """Wake the tasks that wait for a server or for a state change."""
        self._tell_change()
        async with self._changed:
            self._changed.notify_all()

    async def pause(self) -> None:
        """Start no requests until `resume`."""
        if not self.paused:
            self._paused_since = time.monotonic()
        self.paused = True
        await self.notify()

    async def resume(self) -> None:
        """Start requests again."""
        self._earlier_pauses = self.paused_seconds
        self.paused = False
        await self.notify()

    async def set_version(self, version: str, servers: Iterable[PooledServer]) -> None:
        """`version` is current, and `servers` have it."""
        self.version = version
        for server in servers:
            server.version = version
        await self.notify()

    def states(self) -> dict[str, ServerState]:
        """The states of the servers, by URL."""
        serving = self.serving
        return {s.url: ServerState(s.alive, s in serving, s.reason) for s in self.servers}

    async def follow(self, version: str | None, states: Mapping[str, ServerState]) -> None:
        """Take over the owner's version and states.

        A server that only this client can't reach stays down here. One whose other weights the
        owner does not know yet stays excluded, until the version changes.
        """
        changed = version != self.version
        self.version = version
        for server in self.servers:
            state = states[server.url]
            if not state.alive:
                server.alive = False
                server.reason = state.reason
                for task in list(server.tasks):
                    task.cancel()
            elif server.down_for_all:
                server.alive = True
                server.reason = ""
                server.failed_requests = 0
            server.down_for_all = not state.alive
            server.found_stale = server.found_stale and not changed
            server.version = version if state.has_weights and not server.found_stale else None
        await self.notify()

    async def mark_down(self, server: PooledServer, reason: str) -> None:
        """Remove a server that does not respond.

        Its requests are cancelled, to be repeated elsewhere.
        """
        if server.alive:
            self._log(f"{server.url} is down: {reason}")
            server.times_down += 1
            doublings = min(server.times_down - 1, _MAX_DOUBLINGS)
            server.check_after = time.monotonic() + min(
                _COOL_DOWN_SECONDS * 2**doublings, _MAX_COOL_DOWN_SECONDS
            )
            server.missed_checks = 0
        server.alive = False
        server.version = None
        server.reason = reason
        server.failed_requests = 0
        for task in list(server.tasks):
            task.cancel()
        await self.notify()

    async def mark_failed(self, server: PooledServer, reason: str) -> None:
        """Count a failed request.

        After several in a row the server is removed: it would take work only to fail it.
        """
        server.failed_requests += 1
        if server.failed_requests >= _MAX_FAILED_REQUESTS:
            await self.mark_down(
                server, f"{_MAX_FAILED_REQUESTS} requests in a row failed, the last: {reason}"
            )

    def mark_succeeded(self, server: PooledServer) -> None:
        """Note a valid response; earlier failures no longer count."""
        server.failed_requests = 0
        server.times_down = 0
        server.last_response = time.monotonic()

    async def mark_stale(self, server: PooledServer, reason: str) -> None:
        """Remove a server with the wrong weights until the next update."""
        if server in self.serving:
            self._log(f"{server.url} is excluded until it has the weights: {reason}")
        server.version = None
        server.reason = reason
        server.found_stale = not self._owner
        await self.notify()

    async def monitor(self) -> None:
        """Check every server until cancelled: one that does not respond is removed, one that
        returns needs weights. An end by a bug, which would go unnoticed, is logged.
        """
        watches = [self._monitor(server) for server in self.servers]
        if self._processes is not None:
            watches.append(self._monitor_processes(self._processes))
        try:
            await asyncio.gather(*watches)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._log(
                f"the servers are no longer monitored ({reason}): stop the run and start it again"
            )

    async def _monitor_processes(self, processes: LocalServers) -> None:
        by_url = {server.url: server for server in self.servers}
        while True:
            # `processes` reports the reason; health checks find who is back.
            for url in processes.poll().died:
                await self.mark_down(by_url[url], "its process ended")
            for server in self.servers:
                if server.unresponsive:
                    server.unresponsive = False
                    self._log(
                        f"{server.url}: does not answer ({server.reason}); it is started again"
                    )
                    await asyncio.get_running_loop().run_in_executor(
                        None, processes.restart, server.url
                    )
            await asyncio.sleep(_PROCESS_POLL_SECONDS)

    async def _monitor(self, server: PooledServer) -> None:
        while True:
            await self.health_check(server)
            await asyncio.sleep(self._config.health_interval)

    async def ping(self, server: PooledServer) -> ServerError | None:
        """Query a server once, at any time; if it does not respond it is removed, and the
        reason is returned.
        """
        try:
            await self._api.weight_version(server.client, timeout=self._config.health_timeout)
        except ServerError as error:
            await self.mark_down(server, first_line(error))
            return error
        return None

    async def health_check(self, server: PooledServer) -> None:
        """Check one server, and remove it or bring it back accordingly."""
        self._checks_running += 1
        try:
            await self._check(server)
        finally:
            self._checks_running -= 1
            await self.notify()

    async def wait_for_checks(self) -> None:
        """Wait until no health check is running: a check is a request, and some commands need
        an idle server.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._checks_running == 0)

    async def _check(self, server: PooledServer) -> None:
        cooling_down = not server.alive and time.monotonic() < server.check_after
        # During a weight update a server may not respond; the update has timeouts.
        if self.paused or cooling_down:
            return
        if not self._owner and (server.alive or server.down_for_all):
            return
        was_alive = server.alive
        try:
            version = await self._query(server)
        except ServerError as error:
            if not self.paused:
                await self._record_missed_check(server, error)
            return
        server.missed_checks = 0
        if not was_alive and not server.alive:
            server.alive = True
            server.unresponsive = False
            server.reason = ""
            server.version = version if version == self.version else None
            self._log(
                f"{server.url} is back" + ("" if server.version else " and waits for weights")
            )
            await self.notify()

    async def _query(self, server: PooledServer) -> str | None:
        """The weight version of a server that works.

        Only the health endpoint proves that a server works: it generates a token. But this takes a
        second, which a weight update would have to wait for, and a paused server does not answer
        it. So it is used for a busy server that has not responded for a while, and for one that
        returns.
        """
        timeout = self._config.health_timeout
        now = time.monotonic()
        busy = server.tasks or now - server.busy_elsewhere_at < _REPORT_SECONDS
        if server.alive and busy and now - server.last_response > self._config.health_interval:
            await self._api.check_health(server.client, timeout=timeout)
            return None
        version = await self._api.weight_version(server.client, timeout=timeout)
        if not server.alive and not (version or "").endswith(INCOMPLETE):
            await self._api.check_health(server.client, timeout=timeout)
        return version

    async def _record_missed_check(self, server: PooledServer, error: ServerError) -> None:
        server.missed_checks += 1
        too_many = server.missed_checks >= _MAX_MISSED_CHECKS
        if server.alive and (too_many or not error.sent):
            await self.mark_down(server, first_line(error))
        no_response = error.sent and error.status is None
        # Also if it was removed for another reason; repeated after as many checks.
        if too_many and no_response:
            server.unresponsive = True
            server.missed_checks = 0
