"""Groups in flight: started in one call, taken in others as they finish, across weight updates.

A started group is taken exactly once, or discarded by `stop`. Requests run in the event loop of the
HTTP clients; the methods of `RequestStream` are called from the training thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.server_engine.open_group import RESPONSES, GroupKind, OpenGroup
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from megatron_gspo.servers.http_client import EventLoop

_POLL_SECONDS = 0.5  # between two checks of the pool while no group finishes


class WeightsNeeded(Exception):
    """No server has the current weights, and at least one can take them: update the weights,
    then call again.
    """


class GroupProgress(Protocol):
    """How far a group is. ticket: its number in the order of the requests. oldest_version: the
    oldest weight version among its tokens; None if it has no tokens."""

    @property
    def ticket(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def oldest_version(self) -> int | None: ...


G = TypeVar("G", bound=GroupProgress)


class Progress(NamedTuple):
    """How far a group was at one moment; see `GroupProgress`."""

    ticket: int
    finished: bool
    oldest_version: int | None


@dataclass
class _Started:
    """A group whose requests run."""

    ticket: int
    """Its number in the order of `RequestStream.start`."""

    group: OpenGroup
    task: asyncio.Task[None] | None = None
    finished: bool = False


class RequestStream:
    """The groups of one client, as the module says."""

    def __init__(
        self, client: ResponseGenerator, loop: EventLoop, kind: GroupKind = RESPONSES
    ) -> None:
        """loop: in which the client's coroutines run. kind: what a group is."""
        self._client = client
        self._kind = kind
        self._loop = loop
        self._groups: dict[int, _Started] = {}
        self._num_tickets = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._no_server_since: float | None = None  # kept between calls of `take`

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[int]:
        """Start a group for each prompt; returns at once, with the ticket of each group.

        Raises ValueError for a prompt that the model can't take; nothing is sent then.
        """
        groups = [self._kind.open(self._client, prompt, sampling, seed) for prompt in prompts]
        return self._loop.run(self._start(groups))

    def take(self, count: int, *, patience: float | None = None) -> list[list[Sample]]:
        """`count` finished groups, those started first in front; each with its samples in order.

        patience: seconds after which fewer are returned; None waits.

        Raises `WeightsNeeded`; `NoServerError` if no server responded for `recovery_timeout`
        seconds; `EngineError` for a request that failed permanently.
        """
        return [samples for _, samples in self.take_tickets(count, patience=patience)]

    def take_tickets(
        self, count: int, *, patience: float | None = None
    ) -> list[tuple[int, list[Sample]]]:
        """Like `take`, with the ticket of each group."""
        if count > len(self._groups):
            raise ValueError(f"take({count}): only {len(self._groups)} groups were started")
        groups = self._loop.run(self._take(count, patience))
        return [(started.ticket, started.group.samples()) for started in groups]

    def progress(self) -> list[Progress]:
        """How far each group is that was not taken."""
        return self._loop.run(self._progress())

    def wait(self, seconds: float) -> None:
        """Wait until a group has finished since the last `progress`, at most `seconds`; not if none
        is unfinished.

        Raises as `take`.
        """
        self._loop.run(self._wait_for_change(seconds))

    def remove(self, tickets: Sequence[int]) -> list[list[Sample]]:
        """Take these groups, which are finished."""
        self._no_server_since = None
        return [self._groups.pop(ticket).group.samples() for ticket in tickets]

    def stop(self, *, keep: bool) -> None:
        """Interrupt generation. keep: groups continue after the next update or `take`.
        Otherwise all groups that were not taken, finished or not, are discarded.
        """
        self._loop.run(self._stop(keep))

    async def _start(self, groups: Sequence[OpenGroup]) -> list[int]:
        tickets = []
        for group in groups:
            started = _Started(self._num_tickets, group)
            self._groups[started.ticket] = started
            started.task = asyncio.ensure_future(self._play(started))
            tickets.append(started.ticket)
            self._num_tickets += 1
        return tickets

    async def _play(self, started: _Started) -> None:
        try:
            await started.group.play()
            started.finished = True
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    async def _take(self, count: int, patience: float | None) -> list[_Started]:
        pool = self._client.pool
        end = math.inf if patience is None else time.monotonic() + patience
        if pool.paused:
            await pool.resume()
        while True:
            await self._client.hear()
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            chosen = [group for group in self._groups.values() if group.finished][:count]
            now = time.monotonic()
            if len(chosen) == count or now >= end:
                break
            self._check_servers(now)
            await self._wait(min(_POLL_SECONDS, end - now))
        if len(chosen) == count:
            self._no_server_since = None
        for group in chosen:
            del self._groups[group.ticket]
        return chosen

    async def _progress(self) -> list[Progress]:
        await self._client.hear()
        self._changed.clear()
        return [
            Progress(started.ticket, started.finished, started.group.oldest_version)
            for started in self._groups.values()
        ]

    async def _wait_for_change(self, seconds: float) -> None:
        if self._client.pool.paused:
            await self._client.pool.resume()
        await self._client.hear()
        if self._failure is None and not all(group.finished for group in self._groups.values()):
            self._check_servers(time.monotonic())
            await self._wait(seconds)
        if self._failure is not None:
            raise self._failure

    def _check_servers(self, now: float) -> None:
        """Raise if the groups cannot finish without a weight update, or no server has responded
        for too long.
        """
        pool = self._client.pool
        if pool.serving:
            self._no_server_since = None
            return
        if pool.stale:
            self._no_server_since = None
            raise WeightsNeeded
        if self._no_server_since is None:
            self._no_server_since = now
        patience = self._client.recovery_timeout
        if now - self._no_server_since > patience:
            raise NoServerError(f"no server has answered for {patience:g} s: {pool.describe()}")

    async def _wait(self, seconds: float) -> None:
        """Wait until a group has finished since `_changed` was cleared, at most `seconds`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(seconds, 0.0))

    async def _stop(self, keep: bool) -> None:
        await self._client.interrupt_requests()
        if keep:
            return
        dropped = list(self._groups.values())
        tasks = [started.task for started in dropped if started.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for started in dropped:
            self._client.counts["discarded_tokens"] += started.group.discard()
        self._groups.clear()
        await self._client.pool.resume()


def select_groups(groups: Sequence[G], count: int, oldest: int | None, per_step: int) -> list[G]:
    """Finished groups to take, at most `count`; fewer if unfinished ones must be waited for.

    A group whose oldest token is of version `oldest + k` must be taken within k steps. Of the
    groups with at most k steps left, all but the `k * per_step` that later steps take must be taken
    now: they come first, and slots are reserved for those that are not finished. The other slots go
    to the groups that were started first.
    """
    finished = [group for group in groups if group.finished]
    if oldest is None:
        return finished[:count]
    steps_left = {
        group.ticket: max(group.oldest_version - oldest, 0)
        for group in groups
        if group.oldest_version is not None
    }
    chosen: dict[int, G] = {}
    reserved = 0
    for steps in sorted(set(steps_left.values())):
        within = [group for group in groups if steps_left.get(group.ticket, steps + 1) <= steps]
        missing = max(min(len(within) - steps * per_step, count) - len(chosen) - reserved, 0)
        ready = [group for group in within if group.finished and group.ticket not in chosen]
        ready = ready[:missing]
        chosen |= {group.ticket: group for group in ready}
        reserved += missing - len(ready)
    others = [group for group in finished if group.ticket not in chosen]
    return [*chosen.values(), *others[: count - reserved - len(chosen)]]
