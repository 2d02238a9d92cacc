"""Wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T],
    seconds: float = 300.0,
    *,
    pause: float = 0.02,
    alive: Callable[[], object] = lambda: True,
    said: Callable[[], str] = str,
) -> T:
    """The first true value of `condition`, which is asked every `pause` seconds.

    AssertionError with the end of `said()`, for example a log, after `seconds`, or where `alive()`
    is false before.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert alive(), f"what was waited for has ended: {said()[-3000:]}"
        assert time.monotonic() < deadline, f"nothing within {seconds} s: {said()[-3000:]}"
        time.sleep(pause)
    return value
