"""Progress of a run: a bar in a terminal, else a line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """The main metrics that exist: `reward 0.512  accuracy 61.2%  3,412 tok/s`."""
    parts = []
    for name, words in _SHOWN:
        value = metrics.get(name)
        if value is not None:
            parts.append(words(value))
    return "  ".join(parts)


def are_accuracies(mean_rewards: Iterable[float]) -> bool:
    """Whether all can be the share of right responses."""
    return all(0 <= reward <= 1 for reward in mean_rewards)


def held_out_text(mean_reward: float) -> str:
    """The mean reward of held-out prompts: `accuracy 61.2%`, or `held-out reward -2.477`."""
    if are_accuracies([mean_reward]):
        return f"accuracy {100 * mean_reward:.1f}%"
    return f"held-out reward {mean_reward:.3f}"


_SHOWN: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss", lambda v: f"loss {v:.4g}"),
    ("reward/mean", lambda v: f"reward {v:.3f}"),
    ("eval/accuracy", held_out_text),
    ("clip_fraction/tokens", lambda v: f"clip {100 * v:.1f}%"),
    ("perf/tokens_per_second", lambda v: f"{v:,.0f} tok/s"),
    ("perf/generated_tokens_per_second", lambda v: f"generates {v:,.0f} tok/s"),
    ("perf/mfu", lambda v: f"mfu {100 * v:.1f}%"),
    ("perf/trainer_idle", lambda v: f"trainer idle {100 * v:.0f}%"),
    ("perf/servers_idle", lambda v: f"servers idle {100 * v:.0f}%"),
)


def format_time(seconds: float) -> str:
    """`1:05` or `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Progress of a run's steps; a context manager.

    Args:
        total: steps of the whole run.
        start: steps done before this process began (resume).
        stream: where to print, stderr by default.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._start = start
        self._clock = clock
        self._began = clock()
        self._last_accuracy = ""
        self._stream = stream or sys.stderr
        self._bar: RichProgress | None = None
        if self._stream.isatty():
            widest = len(f"step {total}/{total}")
            columns = (
                TextColumn(
                    "step {task.completed}/{task.total}",
                    table_column=Column(min_width=widest, no_wrap=True),
                ),
                BarColumn(10, table_column=Column(min_width=10)),
                # Cut in a narrow terminal.
                TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True)),
            )
            self._bar = RichProgress(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task("", total=total, completed=start, line="")
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show step (counted from 1) as done. The bar, of which the newest line alone is seen,
        keeps the last accuracy with its step."""
        left = f"left {self._time_left(step)}"
        if self._bar is not None:
            accuracy = metrics.get("eval/accuracy")
            if accuracy is not None:
                self._last_accuracy = f"{held_out_text(accuracy)} (step {step})"
            shown = format_metrics({**metrics, "eval/accuracy": None})
            line = "  ".join(text for text in (left, self._last_accuracy, shown) if text)
            self._bar.update(self._task, completed=step, line=line)
        else:
            line = "  ".join(text for text in (format_metrics(metrics), left) if text)
            print(f"step {step}/{self._total}  {line}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, step: int) -> str:
        done = step - self._start
        if done <= 0:
            return "?"
        seconds_per_step = (self._clock() - self._began) / done
        return format_time(seconds_per_step * (self._total - step))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
