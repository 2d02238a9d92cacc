"""A run from its program's start to its rows and its reward."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.conversation import Message
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.runner import AgentExit, Program, run_program
from megatron_gspo.agents.session_tree import Row


@dataclass(frozen=True)
class Outcome:
    """The reward of a run.

    reward: NaN if it has none. failure: why, "timeout: ..." or "error: ...", or "". is_cut: a limit
    has ended the run.
    """

    reward: float
    failure: str = ""
    is_cut: bool = False


Judge = Callable[[AgentRun, Path | None], Awaitable[Outcome]]
"""Scores a run that has ended, from its calls and the directory where its program has worked; None
for a runner's."""


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended. cause: as a message names it. time_limit: seconds that were over, None
    if it has ended by itself."""

    cause: str
    time_limit: float | None = None


@dataclass(frozen=True)
class FinishedRun:
    """The record of a finished run.

    rows: see `SessionTree.rows`. messages: of the last delivered call, its reply included.
    turn_rewards: by index of the delivered call, those that the agent has posted. outcome: with
    what the program has posted for the whole run, and `turn_rewards`. counts: events by the names
    of the metrics; no times, so that a repeated run leaves the same bytes. exit: of the program,
    if there is one.
    """

    rows: tuple[Row, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    turn_rewards: Mapping[int, float]
    counts: Mapping[str, int]
    exit: AgentExit | None = None


async def play(
    endpoint: AgentEndpoint,
    run: AgentRun,
    program: Program,
    directory: Path,
    *,
    task: Mapping[str, Any],
    judge: Judge | None = None,
) -> FinishedRun:
    """Run an agent once. Its key is revoked when its program has ended.

    directory: where it works, a new one; it is removed afterwards. task: see
    `run_program`; the addresses and the key of the run are added. judge: scores the run; without one
    its rewards are those that the agent posts.
    """
    addresses = {
        "base_url": endpoint.base_url(run),
        "anthropic_url": endpoint.anthropic_url(run),
        "key": run.key,
        "directory": str(directory),
    }
    await asyncio.to_thread(directory.mkdir, parents=True)
    try:
        ended = await run_program(program, {**task, **addresses}, directory, clock=run.clock())
        endpoint.end_run(run)
        time_limit = program.run_timeout if ended.timed_out else None
        outcome = await scored(run, RunEnd(_end_of(ended), time_limit), judge, directory)
    finally:
        endpoint.end_run(run)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return finished_run(run, outcome, exit=ended)


async def scored(
    run: AgentRun, end: RunEnd, judge: Judge | None, directory: Path | None = None
) -> Outcome:
    """Score a run that has ended."""
    if judge is not None and run.tree.delivered and end.time_limit is None:
        return await judge(run, directory)
    return posted_outcome(run, end)


def finished_run(
    run: AgentRun,
    outcome: Outcome,
    *,
    exit: AgentExit | None = None,
    events: Mapping[str, int] | None = None,
) -> FinishedRun:
    """The record of a run that has ended. events: further counts."""
    delivered = run.tree.delivered
    rows = tuple(run.tree.rows())
    counts = {
        **run.tree.counts,
        "rows": len(rows),
        "undelivered": run.tree.undelivered,
        **(events or {}),
    }
    return FinishedRun(
        rows=rows,
        messages=delivered[-1].messages if delivered else (),
        outcome=outcome,
        turn_rewards=run.turn_rewards,
        counts=counts,
        exit=exit,
    )


def posted_outcome(run: AgentRun, end: RunEnd) -> Outcome:
    """The sum of the rewards that the agent has posted, or why there is none."""
    if not run.tree.delivered:
        return Outcome(math.nan, f"error: the agent made no call ({end.cause})")
    if run.reward is not None or run.turn_rewards:
        return Outcome((run.reward or 0.0) + math.fsum(run.turn_rewards.values()))
    if end.time_limit is not None:
        return Outcome(
            math.nan, f"timeout: the agent ran for {end.time_limit:g} s without a reward"
        )
    return Outcome(math.nan, f"error: the agent ended without a reward ({end.cause})")


def _end_of(ended: AgentExit) -> str:
    """The exit code, and the last line of what a program has printed."""
    last_line = ended.tail.rpartition("\n")[2][:300]
    return f"exit code {ended.code}" + (f": {last_line}" if last_line else "")
