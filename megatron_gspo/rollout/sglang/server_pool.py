"""The servers of a run: which of them may serve, how much each has to do, and who is taken out and brought back.

A server serves while it answers (`alive`) and holds the current weights (`version`). Everything here runs in one
event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_gspo.errors import EngineError, first_line
from megatron_gspo.servers.http_client import Server, ServerError

INCOMPLETE = ":incomplete"  # ends the version of a server that is in an update, or was left in one: it is paused
_STRIKES = 3  # health checks in a row that a server may miss
_FAULTS = 4  # requests in a row that may fail at a server
_COOL_DOWN, _LONGEST_COOL_DOWN = 1.0, 60.0  # seconds that a lost server stays out, doubling each time
_DOUBLINGS = 6  # until the longest


class FleetError(EngineError):
    """No server to go on with; one line that says what happened to each."""


@dataclass
class Member:
    """A server and what is known of it.

    alive: it answered last. version: wire version of its weights, None while unknown or half updated. outstanding:
    tokens of the requests that are under way. requests: their number. strikes: health checks that it missed in a row.
    faults: requests that failed in a row. losses: times it was taken out since its last good answer. hangs: it is out,
    takes connections and doesn't answer. reason: why it is out. not_before: when it may be looked at again; answered:
    when it last answered a request (monotonic seconds).
    """

    server: Server
    alive: bool = True
    version: str | None = None
    outstanding: int = 0
    requests: int = 0
    strikes: int = 0
    faults: int = 0
    losses: int = 0
    hangs: bool = False
    reason: str = ""
    not_before: float = 0.0
    answered: float = 0.0
    tasks: set[asyncio.Task] = field(default_factory=set)


@dataclass(frozen=True)
class FleetSettings:
    """max_requests: most requests under way at one server. health_interval: seconds between two looks at a server;
    health_timeout: what it may take to answer one."""

    max_requests: int = 256
    health_interval: float = 5.0
    health_timeout: float = 10.0


class Fleet:
    """See the module. `version`: the wire version that answers must be of; None before the first update."""

    def __init__(self, servers: Sequence[Server], settings: FleetSettings, *,
                 say: Callable[[str], None] = lambda line: None) -> None:
        """say: takes a line about each server that is taken out or comes back."""
        self.members = [Member(server) for server in servers]
        self.settings = settings
        self._say = say
        self.version: str | None = None
        self.held = False  # while weights move: no request begins
        self._looks = 0  # under way
        self._changed = asyncio.Condition()

    @property
    def serving(self) -> list[Member]:
        """Members that may take requests."""
        return [m for m in self.members if m.alive and m.version is not None and m.version == self.version]

    @property
    def stale(self) -> list[Member]:
        """Members that answer and lack the current weights."""
        return [m for m in self.members if m.alive and (m.version is None or m.version != self.version)]

    def describe(self) -> str:
        """What is wrong, server by server."""
        return "; ".join(f"{m.server.url}: {m.reason or ('lacks the weights' if m in self.stale else 'serves')}"
                         for m in self.members)

    @asynccontextmanager
    async def use(self, cost: int, *, near: Member | None = None) -> AsyncIterator[Member]:
        """A serving member for a request of `cost` tokens: `near` where it still serves, else the least loaded.

        Waits while none has room. Cancelling the waiter is fine.
        """
        member = await self._pick(near)
        member.outstanding += cost
        member.requests += 1
        try:
            yield member
        finally:
            member.outstanding -= cost
            member.requests -= 1
            async with self._changed:
                self._changed.notify()  # one place, one of thousands that may wait

    async def _pick(self, near: Member | None) -> Member:
        async with self._changed:
            while True:
                free = [m for m in self.serving if m.requests < self.settings.max_requests]
                if not self.held and near in free:
                    return near
                if not self.held and free:
                    return min(free, key=lambda m: m.outstanding)
                await self._changed.wait()

    async def notify(self) -> None:
        """Wake those who wait for a server or for a change."""
        async with self._changed:
            self._changed.notify_all()

    async def hold(self, held: bool) -> None:
        """Stop or allow the beginning of requests."""
        self.held = held
        await self.notify()

    async def set_version(self, version: str, members: Iterable[Member]) -> None:
        """`version` is current, and these members have it."""
        self.version = version
        for member in members:
            member.version = version
        await self.notify()

    async def lose(self, member: Member, reason: str) -> None:
        """Take a member out: it doesn't answer. Its requests are cancelled and go to another server."""
        if member.alive:
            self._say(f"{member.server.url} is out: {reason}")
            member.losses += 1
            pause = min(_COOL_DOWN * 2 ** min(member.losses - 1, _DOUBLINGS), _LONGEST_COOL_DOWN)
            member.not_before = time.monotonic() + pause
            member.strikes = 0
        member.alive, member.version, member.reason, member.faults = False, None, reason, 0
        for task in list(member.tasks):
            task.cancel()
        await self.notify()

    async def blame(self, member: Member, reason: str) -> None:
        """A request at this member failed; after a few in a row it is taken out, lest it drain the queue by failing."""
        member.faults += 1
        if member.faults >= _FAULTS:
            await self.lose(member, f"{_FAULTS} requests in a row failed, the last: {reason}")

    async def distrust(self, member: Member, reason: str) -> None:
        """A member that answers with other weights than it should have: out until the next update."""
        if member in self.serving:
            self._say(f"{member.server.url} is out until it gets weights: {reason}")
        member.version, member.reason = None, reason
        await self.notify()

    async def watch(self) -> None:
        """Look at every member until cancelled: a silent one is taken out, one that is back waits for weights."""
        await asyncio.gather(*(self._watch(member) for member in self.members))

    async def _watch(self, member: Member) -> None:
        while True:
            await self.look(member)
            await asyncio.sleep(self.settings.health_interval)

    async def ask(self, member: Member) -> ServerError | None:
        """Ask a member once whether it is there, at any time; one that doesn't say so is taken out: the reason."""
        try:
            await member.server.get("/model_info", timeout=self.settings.health_timeout)
        except ServerError as error:
            await self.lose(member, first_line(error))
            return error
        return None

    async def look(self, member: Member) -> None:
        """Ask one member how it is, and take it out or bring it back accordingly."""
        self._looks += 1
        try:
            await self._look(member)
        finally:
            self._looks -= 1
            await self.notify()

    async def quiet(self) -> None:
        """Return when no look is under way: a look is a request, and some orders want a server without any."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._looks == 0)

    async def _look(self, member: Member) -> None:
        cooling = not member.alive and time.monotonic() < member.not_before
        if self.held or cooling:  # a server that takes weights may be silent; the update has deadlines of its own
            return
        was_alive = member.alive
        try:
            info = await self._ask(member)
        except ServerError as error:
            if not self.held:
                await self._note_silence(member, error)
            return
        member.strikes = 0
        if not was_alive and not member.alive:
            version = _version(info)
            member.alive, member.hangs, member.reason = True, False, ""
            member.version = version if version == self.version else None
            self._say(f"{member.server.url} is back" + ("" if member.version else " and waits for weights"))
            await self.notify()

    async def _ask(self, member: Member) -> Any:
        """What a member says of its model, once it is clear that it works.

        /health is the better question, for it has the server generate a token. But that takes a second, which an update
        of the weights would have to wait for, and a server that is paused answers it never: only one that is busy and
        hasn't answered a request for a while is asked it, or one that comes back.
        """
        timeout = self.settings.health_timeout
        if member.alive and member.tasks and time.monotonic() - member.answered > self.settings.health_interval:
            await member.server.get("/health", timeout=timeout)
            return None
        info = await member.server.get("/model_info", timeout=timeout)
        if not member.alive and not (_version(info) or "").endswith(INCOMPLETE):
            await member.server.get("/health", timeout=timeout)
        return info

    async def _note_silence(self, member: Member, error: ServerError) -> None:
        member.strikes += 1
        often = member.strikes >= _STRIKES
        if member.alive and (often or not error.sent):
            await self.lose(member, first_line(error))
        hangs = error.sent and error.status is None
        if often and hangs:  # also one that was taken out for another reason; anew after as many strikes
            member.hangs, member.strikes = True, 0


def _version(info: Any) -> str | None:
    version = info.get("weight_version") if isinstance(info, dict) else None
    return version if isinstance(version, str) else None
