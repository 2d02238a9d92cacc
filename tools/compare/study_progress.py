"""Progress of all runs: a bar for each running one in a terminal, otherwise one line for each
that ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megatron_gspo.tools.compare.run_records import Figures, figures, read_run
from megatron_gspo.tools.compare.study_plan import RunSpec
from megatron_gspo.tracking.progress import format_time

_REFRESH = 1.0  # seconds between two reads of the running runs' metrics


class Display:
    """Called by ``study_runner.execute``; a context manager.

    total: number of runs. slots: runs at a time, to estimate the remaining time.
    """

    def __init__(
        self,
        total: int,
        slots: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._slots = slots
        self._clock = clock
        self._stream = stream or sys.stderr
        self._done = 0
        self._seconds: list[float] = []
        self._refreshed = clock()
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        if self._stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(20),
                TextColumn("{task.fields[line]}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._all = self._bar.add_task("all runs", total=total, line="")
            self._bar.start()

    def started(self, spec: RunSpec) -> None:
        """Add a bar for this run."""
        if self._bar is not None:
            self._tasks[spec.name] = self._bar.add_task(spec.name, total=None, line="starting")

    def running(self, active: Sequence[RunSpec]) -> None:
        """Update the bars of the running ones, once a second."""
        if self._bar is None or self._clock() - self._refreshed < _REFRESH:
            return
        self._refreshed = self._clock()
        for spec in active:
            run = read_run(spec.run_dir, variant=spec.variant, seed=spec.seed)
            total = run.setting("training.steps")
            if total and run.records:
                progress = f"step {run.last_step}/{total}"
                line = "  ".join(filter(None, [progress, _accuracy(figures(run))]))
                task = self._tasks[spec.name]
                self._bar.update(task, total=total, completed=run.last_step, line=line)

    def ended(self, spec: RunSpec, seconds: float | None) -> None:
        """Print the result of a run.

        seconds: its duration, None for a run that was finished before.
        """
        self._done += 1
        if seconds is None:
            if self._bar is not None:
                self._bar.update(self._all, completed=self._done, line=self._counts())
            return
        self._seconds.append(seconds)
        run = read_run(spec.run_dir, variant=spec.variant, seed=spec.seed)
        numbers = figures(run)
        words = [
            f"{spec.name}: {run.status}",
            run.message,
            "collapsed" if numbers.collapsed else "",
            _accuracy(numbers),
            format_time(seconds),
        ]
        line = ", ".join(filter(None, words))
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
            self._bar.remove_task(self._tasks.pop(spec.name))
            self._bar.update(self._all, completed=self._done, line=self._counts())
        else:
            print(f"{self._counts()}  {line}", file=self._stream, flush=True)

    def _counts(self) -> str:
        text = f"{self._done}/{self._total}"
        if self._seconds and self._done < self._total:
            each = sum(self._seconds) / len(self._seconds)
            text += f"  left {format_time(each * (self._total - self._done) / self._slots)}"
        return text

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _accuracy(numbers: Figures) -> str:
    if numbers.final_accuracy is None:
        return ""
    return f"accuracy {100 * numbers.final_accuracy:.1f} %"
