"""Wall time of the phases of a step, and of the parts of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Megatron's names for the parts of an update (and ours for the last), and what they are called in
# the metrics.
_PHASES = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}


Span = tuple[str, float, float]
"""A phase, and when it began and ended, in seconds since the step did."""


class Timers:
    """Seconds by phase; ``read_and_reset`` returns them and starts over."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - begin
            self._spans.append((phase, begin - self._started, end - self._started))

    @property
    def spans(self) -> list[Span]:
        """Since the last ``read_and_reset``, in the order in which they ended."""
        return list(self._spans)

    def read_and_reset(self) -> dict[str, float]:
        """``time/<phase>`` of every phase since the last call, and ``time/step`` for all of it,
        in seconds.
        """
        now = time.perf_counter()
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/step"] = now - self._started
        self._seconds = {}
        self._spans = []
        self._started = now
        return metrics


class UpdateClock:
    """What Megatron's schedule takes as ``config.timers``: seconds of forward, backward and
    optimizer on this rank.

    Megatron starts and stops a timer by name around each micro-batch. A GPU is waited for at both
    ends, as it is in Megatron's own timers, so this costs overlap and is off by default
    (``tracking.detailed_timers``).
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Stopwatch:
        return _Stopwatch(self, name)

    def read_and_reset(self) -> dict[str, float]:
        """``time/forward``, ``time/backward`` and ``time/optimizer`` since the last call, as
        far as they were timed.
        """
        metrics = {
            f"time/{phase}": self._seconds[name]
            for name, phase in _PHASES.items()
            if name in self._seconds
        }
        self._seconds = {}
        return metrics

    def start(self, name: str) -> None:
        self._started[name] = _now()

    def stop(self, name: str) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + _now() - self._started.pop(name)


class _Stopwatch:
    """One of the clock's timers, with the two methods that Megatron calls."""

    def __init__(self, clock: UpdateClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def start(self, **_: object) -> None:
        self._clock.start(self._name)

    def stop(self, **_: object) -> None:
        self._clock.stop(self._name)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
