"""Runs that programs elsewhere play: runners connect by themselves and claim one after another.

A claimed run is leased. A runner that is silent for too long loses it, and another one gets it
from its beginning, with another key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_MAX_REPORT_SECONDS = 600.0  # between two lines about runs that nobody claims


@dataclass(eq=False)
class QueuedRun:
    """A run that waits for a runner. task: what the runner gets of it, JSON-able."""

    run: AgentRun
    task: Mapping[str, Any]
    claimed: asyncio.Event = field(default_factory=asyncio.Event)


class RunQueue:
    """See the module. Everything here runs in the event loop of the endpoint.

    key: with which runners claim runs. lease: seconds without a request of its runner after which
    a run is queued again.
    """

    def __init__(
        self,
        address_file: Path,
        *,
        lease: float,
        key: str | None = None,
        report_seconds: float = 10.0,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        """address_file: where runners find the address and the key. key: None draws one.
        report_seconds: until the first line about runs that nobody claims."""
        self.key = secrets.token_hex(16) if key is None else key
        self.lease = lease
        self._address_file = address_file
        self._report_seconds = report_seconds
        self._log = log
        self._waiting: list[QueuedRun] = []
        self._num_claimed = 0
        self._reporting: asyncio.Task[None] | None = None

    def announce(self, url: str) -> None:
        """Write the address file, which no other user can read and nobody sees half written."""
        self._address_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._address_file.with_name(self._address_file.name + ".tmp")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"url": url, "key": self.key}, file)
        partial.replace(self._address_file)

    def claim(self) -> QueuedRun | None:
        """The run that has waited longest, which is its runner's from now on; None if there is
        none."""
        if not self._waiting:
            return None
        queued = self._waiting.pop(0)
        queued.run.touch()
        queued.claimed.set()
        return queued

    @contextlib.asynccontextmanager
    async def claimed(
        self, run: AgentRun, task: Mapping[str, Any], *, first: bool = False
    ) -> AsyncIterator[None]:
        """Wait until a runner claims the run; the block is the time in which it plays. first: it
        comes before the others, because an earlier runner has lost it."""
        queued = QueuedRun(run, task)
        self._waiting.insert(0 if first else len(self._waiting), queued)
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.ensure_future(self._report())
        try:
            await queued.claimed.wait()
        finally:
            if queued in self._waiting:
                self._waiting.remove(queued)
        self._num_claimed += 1
        try:
            yield
        finally:
            self._num_claimed -= 1

    def close(self) -> None:
        """Take the address back. May be called again."""
        if self._reporting is not None:
            self._reporting.cancel()
        self._address_file.unlink(missing_ok=True)

    async def _report(self) -> None:
        """A line where runs wait and no runner has one, at growing intervals."""
        seconds = self._report_seconds
        while self._waiting:
            await asyncio.sleep(seconds)
            if self._num_claimed or not self._waiting:
                seconds = self._report_seconds
                continue
            self._log(
                f"agents.external: {len(self._waiting)} runs wait for a runner; the address and the"
                f" key are in {self._address_file}"
            )
            seconds = min(2 * seconds, _MAX_REPORT_SECONDS)
