"""Agents for tests, as functions: one whose history branches, one of a single call, and one that
fails."""

from __future__ import annotations

import time

from examples.agents.spell_backward import chat
from megatron_gspo.agents.agent_function import AgentTask


def branching(task: AgentTask) -> float:
    """Four calls: a question, two that both continue it, and one of another history."""
    question = {"role": "user", "content": task.prompt}
    reply = chat(task, [question])
    rewards = []
    for follow_up in ("again", "once more"):
        follow_up_message = {"role": "user", "content": f"\n{follow_up} "}
        answer = chat(task, [question, reply, follow_up_message])
        rewards.append(len(answer["content"]) / 12)
    chat(task, [{"role": "user", "content": task.prompt[::-1]}])
    return sum(rewards)


def single(task: AgentTask) -> float:
    """One call. The reward is the number of the sample."""
    chat(task, [{"role": "user", "content": task.prompt}])
    return float(task.sample)


def failing(task: AgentTask) -> float:
    """Of each group's four runs one hangs, one fails, and two end well; all fail if the data says
    so."""
    chat(task, [{"role": "user", "content": task.prompt}])
    if task.metadata.get("always") or task.sample == 1:
        raise ValueError("no such tool")
    if task.sample == 2:
        time.sleep(600)
    return 0.5
