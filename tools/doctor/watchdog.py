"""Time limits for stages that may hang, checked by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL = 0.1  # seconds


class Watchdog:
    """Calls ``on_timeout(stage, seconds)`` in its own thread, once, when a stage takes longer than its limit.

    on_stage: called with the name of each stage that begins.
    """

    def __init__(
        self, on_timeout: Callable[[str, float], None], on_stage: Callable[[str], None] = lambda stage: None
    ) -> None:
        self._on_timeout, self._on_stage = on_timeout, on_stage
        self._current: tuple[str, float, float] | None = None  # name, limit in seconds, deadline
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="doctor-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def stage(self, name: str, seconds: float) -> Iterator[None]:
        """A block that may take this many seconds. Stages don't nest."""
        self._on_stage(name)
        self._current = (name, seconds, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL):
            current = self._current
            if current is not None and time.monotonic() > current[2]:
                self._on_timeout(current[0], current[1])
                return
