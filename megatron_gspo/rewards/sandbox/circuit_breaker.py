"""A circuit breaker: after several failures in a row a service is left alone for a while."""

from __future__ import annotations

import time


class CircuitBreaker:
    """Open after `threshold` failures in a row; after `seconds` one call may try again."""

    def __init__(self, threshold: int, seconds: float) -> None:
        self._threshold = threshold
        self._seconds = seconds
        self._failures = 0
        self._opened = 0.0

    def allows(self) -> bool:
        """Whether a call may be made now.

        When the time is over, the first caller gets True and restarts it.
        """
        if self._failures < self._threshold:
            return True
        if time.monotonic() - self._opened < self._seconds:
            return False
        self._opened = time.monotonic()
        return True

    def record(self, succeeded: bool) -> None:
        """The result of a call."""
        if succeeded:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= self._threshold:
            self._opened = time.monotonic()
