"""Wall time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Seconds by phase; ``take`` returns them and starts over."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """``time/<phase>`` of every phase since the last call, and ``time/step`` for all of it, in seconds."""
        now = time.perf_counter()
        taken = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        taken["time/step"] = now - self._started
        self._seconds, self._started = {}, now
        return taken
