"""A run from its program's start to its rows and its reward."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.runner import AgentExit, AgentProgram, run_program
from megatron_gspo.agents.session_tree import Row


@dataclass(frozen=True)
class FinishedRun:
    """What a run leaves.

    rows: see `SessionTree.rows`. reward: NaN if it is unscored. unscored: why, or "": "no calls",
    "no reward", "failed" (another exit code than 0) or "timeout". turn_rewards: by index of the
    delivered call, those that the agent has posted. oldest_version: of a trained token, None
    without any. counts: events, by the names of the metrics.
    """

    rows: tuple[Row, ...]
    reward: float
    unscored: str
    turn_rewards: Mapping[int, float]
    oldest_version: int | None
    undelivered: int
    counts: Mapping[str, int]
    exit: AgentExit


async def play(
    endpoint: AgentEndpoint,
    program: AgentProgram,
    directory: Path,
    *,
    seed: int,
    values: Mapping[str, str],
    failure_reward: float | None = None,
) -> FinishedRun:
    """Run an agent once. Its key is revoked when its program has ended.

    directory: where it works, a new one; it is removed afterwards. values: for the names in braces
    in the program's command and environment, such as prompt. failure_reward: of a run that its
    program has left without a reward, with an exit code other than 0 or by the time limit; None
    leaves it unscored.
    """
    run = endpoint.open_run(seed)
    addresses = {
        "base_url": endpoint.base_url(run),
        "anthropic_url": endpoint.anthropic_url(run),
        "key": run.key,
    }
    await asyncio.to_thread(directory.mkdir, parents=True)
    try:
        ended = await run_program(program, {**values, **addresses}, directory)
    finally:
        endpoint.end_run(run)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    reward, unscored = _reward(run, ended, failure_reward)
    return FinishedRun(
        rows=tuple(run.tree.rows()),
        reward=reward,
        unscored=unscored,
        turn_rewards=run.turn_rewards,
        oldest_version=run.tree.oldest_version,
        undelivered=run.tree.undelivered,
        counts=dict(run.tree.counts),
        exit=ended,
    )


def _reward(run: AgentRun, ended: AgentExit, failure_reward: float | None) -> tuple[float, str]:
    """The reward and, if it is NaN, why."""
    if not run.tree.delivered:
        return math.nan, "no calls"
    if run.reward is not None:
        return run.reward, ""
    is_failed = ended.timed_out or ended.code != 0
    if is_failed and failure_reward is not None:
        return failure_reward, ""
    if ended.timed_out:
        return math.nan, "timeout"
    return math.nan, "failed" if is_failed else "no reward"
