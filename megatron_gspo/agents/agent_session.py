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
    """What a run has earned.

    reward: NaN if it has none. failure: why, "timeout: ..." or "error: ...", or "".
    """

    reward: float
    failure: str = ""


Judge = Callable[[AgentRun, Path], Awaitable[Outcome]]
"""Scores a run whose program has ended, from its calls and the directory where it has worked."""


@dataclass(frozen=True)
class FinishedRun:
    """What a run leaves.

    rows: see `SessionTree.rows`. messages: of the last delivered call, its reply included.
    turn_rewards: by index of the delivered call, those that the agent has posted. outcome: with
    what the program has posted for the whole run, and `turn_rewards`. counts: events by the names
    of the metrics; no times, so that a repeated run leaves the same bytes.
    """

    rows: tuple[Row, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    turn_rewards: Mapping[int, float]
    counts: Mapping[str, int]
    exit: AgentExit


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
        ended = await run_program(program, {**task, **addresses}, directory)
        endpoint.end_run(run)
        outcome = posted_outcome(run, ended, program.run_timeout)
        if judge is not None and run.tree.delivered and not ended.timed_out:
            outcome = await judge(run, directory)
    finally:
        endpoint.end_run(run)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    delivered = run.tree.delivered
    rows = tuple(run.tree.rows())
    events = {
        **run.tree.counts,
        "rows": len(rows),
        "undelivered": run.tree.undelivered,
    }
    return FinishedRun(
        rows=rows,
        messages=delivered[-1].messages if delivered else (),
        outcome=outcome,
        turn_rewards=run.turn_rewards,
        counts=events,
        exit=ended,
    )


def posted_outcome(run: AgentRun, ended: AgentExit, run_timeout: float) -> Outcome:
    """The sum of the rewards that the agent has posted, or why there is none."""
    if not run.tree.delivered:
        return Outcome(math.nan, f"error: the agent made no call ({_end_of(ended)})")
    if run.reward is not None or run.turn_rewards:
        return Outcome((run.reward or 0.0) + math.fsum(run.turn_rewards.values()))
    if ended.timed_out:
        return Outcome(math.nan, f"timeout: the agent ran for {run_timeout:g} s without a reward")
    return Outcome(math.nan, f"error: the agent ended without a reward ({_end_of(ended)})")


def _end_of(ended: AgentExit) -> str:
    """The exit code, and the last line of what a program has printed."""
    last_line = ended.tail.rpartition("\n")[2][:300]
    return f"exit code {ended.code}" + (f": {last_line}" if last_line else "")
