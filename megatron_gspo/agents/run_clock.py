"""Time limits of runs that stand still while the trainer works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

_SHORTEST_WAIT = 0.05  # while a pause keeps the time left from running out


class RunClock:
    """The seconds since it was made, without those in which calls were paused."""

    def __init__(self, paused_seconds: Callable[[], float]) -> None:
        """paused_seconds: in which calls have been paused, up to now; see `Generator`."""
        self._paused_seconds = paused_seconds
        self._start = time.monotonic() - paused_seconds()

    @property
    def seconds(self) -> float:
        """See the class."""
        return time.monotonic() - self._paused_seconds() - self._start


async def ends_in_time(
    coroutine: Coroutine[Any, Any, Any], seconds_left: Callable[[], float]
) -> bool:
    """Whether a coroutine ends before no time is left; it is cancelled otherwise."""
    waiting = asyncio.ensure_future(coroutine)
    try:
        while (left := seconds_left()) > 0:
            if (await asyncio.wait({waiting}, timeout=max(left, _SHORTEST_WAIT)))[0]:
                return True
        return waiting.done()
    finally:
        waiting.cancel()
