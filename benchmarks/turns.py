"""Two programs that work alternately: each runs a segment of its work on request and waits in
between.

The protocol is lines: the worker prints ``@@ `` and a JSON object after each segment (the first is
its warm-up); it continues at a line on its standard input and ends when that is closed.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

MARK = "@@ "


class Worker:
    """A running program. ``limit`` bounds, in seconds, start with warm-up and then each segment.

    Raises ``RuntimeError`` with the end of its error output if it dies or takes longer.
    """

    def __init__(self, name: str, command: Sequence[str], *, limit: float) -> None:
        self.name = name
        self.limit = limit
        self._errors = tempfile.TemporaryFile(mode="w+")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env
        )
        self._buffer = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def segment(self) -> dict[str, Any]:
        """Run one segment and return its report."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended early") from None
        return self.report()

    def report(self) -> dict[str, Any]:
        """The next report: that of the warm-up, if no segment was requested."""
        deadline = time.monotonic() + self.limit
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    return json.loads(text[len(MARK) :])
                continue
            self._read(deadline)

    def _read(self, deadline: float) -> None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                raise self._failure(f"took longer than {self.limit:.0f} s")
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        if not chunk:
            raise self._failure("ended early")
        self._buffer += chunk

    def _failure(self, what: str) -> RuntimeError:
        self._process.poll()
        self._errors.seek(0)
        return RuntimeError(f"{self.name} {what}:\n{self._errors.read()[-3000:]}")


def take_turns(workers: Sequence[Worker], turns: int) -> list[list[dict[str, Any]]]:
    """Warm-up of each, then one segment of each per turn, the order alternating; the reports by
    worker.
    """
    for worker in workers:
        worker.report()
    reports: list[list[dict[str, Any]]] = [[] for _ in workers]
    for turn in range(turns):
        order = range(len(workers)) if turn % 2 == 0 else reversed(range(len(workers)))
        for i in order:
            reports[i].append(workers[i].segment())
    return reports
