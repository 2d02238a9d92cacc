"""A time limit on what may hang: a thread that looks at the clock and calls for the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL = 0.1  # seconds


class Watch:
    """Calls `late(stage, seconds)` in a thread of its own when a stage takes longer than it may, once."""

    def __init__(self, late: Callable[[str, float], None], begin: Callable[[str], None] = lambda stage: None) -> None:
        self._late, self._begin = late, begin
        self._current: tuple[str, float, float] | None = None  # name, seconds, when it is late
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="doctor-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def stage(self, name: str, seconds: float) -> Iterator[None]:
        """Within it, so many seconds are allowed. Stages don't nest."""
        self._begin(name)
        self._current = (name, seconds, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(_POLL):
            current = self._current
            if current is not None and time.monotonic() > current[2]:
                self._late(current[0], current[1])
                return
