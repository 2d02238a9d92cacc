"""Who plays the runs of a rank: a program that is started for each, or runners that claim them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.agent_session import (
    FinishedRun,
    Judge,
    RunEnd,
    finished_run,
    play,
    scored,
)
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.run_clock import ends_in_time
from megatron_gspo.agents.run_queue import RunQueue
from megatron_gspo.agents.runner import Program
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_MAX_LEASES = 3  # of a run whose runners fall silent


class Player(Protocol):
    """Plays runs, several at the same time."""

    async def play(
        self,
        endpoint: AgentEndpoint,
        open_run: Callable[[], AgentRun],
        *,
        task: Mapping[str, Any],
        judge: Judge | None = None,
    ) -> FinishedRun:
        """Play a run to its end. open_run: of the endpoint; a run that is opened again begins anew.
        task: what the agent may know, see `AgentTask`. judge: scores the run; without one its
        rewards are those that the agent posts.

        Raises what the run's generator raises.
        """
        ...

    async def close(self) -> None:
        """Free what runs share. May be called again."""
        ...


class ProgramPlayer:
    """Starts a program for each run, in a directory of its own."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-gspo-agents-"))
        self._numbers = itertools.count()

    async def play(
        self,
        endpoint: AgentEndpoint,
        open_run: Callable[[], AgentRun],
        *,
        task: Mapping[str, Any],
        judge: Judge | None = None,
    ) -> FinishedRun:
        """See `Player.play`."""
        run = open_run()
        directory = self._folder / f"run-{next(self._numbers)}"
        finished = await play(endpoint, run, self._program, directory, task=task, judge=judge)
        if run.failure is not None:
            raise run.failure
        return finished

    async def close(self) -> None:
        """See `Player.close`."""
        await self._program.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class RunnerPlayer:
    """Queues runs, which runners claim, play and end."""

    def __init__(self, queue: RunQueue, *, run_timeout: float) -> None:
        """queue: that the endpoint serves. run_timeout: seconds from the claim on, after which a
        run is ended."""
        self._queue = queue
        self._run_timeout = run_timeout

    async def play(
        self,
        endpoint: AgentEndpoint,
        open_run: Callable[[], AgentRun],
        *,
        task: Mapping[str, Any],
        judge: Judge | None = None,
    ) -> FinishedRun:
        """See `Player.play`. A run whose runner falls silent begins anew with the next one; the
        last of `_MAX_LEASES` counts as it is."""
        num_expired = 0
        while True:
            run = open_run()
            try:
                async with self._queue.claimed(run, task, first=num_expired > 0):
                    end = await self._end_of(run)
            finally:
                endpoint.end_run(run)
            if run.failure is not None:
                raise run.failure
            if end is None:
                num_expired += 1
                silence = f"its runner was silent for {self._queue.lease:g} s"
                if num_expired < _MAX_LEASES:
                    name = f"run {task['index']}/{task['sample']}"
                    logger.info(f"agents.external: {name} begins anew: {silence}")
                    continue
                end = RunEnd(f"{silence}, {num_expired} times")
            outcome = await scored(run, end, judge)
            return finished_run(run, outcome, events={"expired_leases": num_expired})

    async def close(self) -> None:
        """See `Player.close`."""
        self._queue.close()

    async def _end_of(self, run: AgentRun) -> RunEnd | None:
        """How a claimed run ends; None if its runner falls silent."""
        clock = run.clock()
        if await ends_in_time(
            run.over.wait(),
            lambda: min(self._queue.lease - run.silence, self._run_timeout - clock.seconds),
        ):
            return RunEnd("its runner has ended it")
        if clock.seconds >= self._run_timeout:
            return RunEnd("its time was over", self._run_timeout)
        return None
