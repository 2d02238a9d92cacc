"""Runs that go on together, so that nothing they do depends on time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar


class Seeded(Protocol):
    """A request with a seed of its own."""

    @property
    def seed(self) -> int: ...


Request = TypeVar("Request", bound=Seeded)
Result = TypeVar("Result")


class Rounds:
    """Runs of one event loop call functions that block and take many requests: when every run that
    has not ended waits, the function is called once with all of their requests."""

    def __init__(self, num_runs: int) -> None:
        """num_runs: each calls `end_run` when it ends."""
        self._num_running = num_runs
        self._waiting: list[tuple[Callable[..., Any], Any, asyncio.Future[Any]]] = []

    async def call(
        self, function: Callable[[Sequence[Request]], Sequence[Result]], request: Request
    ) -> Result:
        """The request's result; all runs call the same function at a time."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((function, request, result))
        self._play_round()
        return await result

    def end_run(self) -> None:
        """One run calls no more."""
        self._num_running -= 1
        self._play_round()

    def _play_round(self) -> None:
        """Call the function, unless a run has not come yet. Raises what it raises."""
        if not self._waiting or len(self._waiting) < self._num_running:
            return
        waiting = sorted(self._waiting, key=lambda call: call[1].seed)
        self._waiting = []
        function = waiting[0][0]
        results = function([request for _, request, _ in waiting])
        for (_, _, future), result in zip(waiting, results, strict=True):
            future.set_result(result)
