"""An agent that is a Python function: what it gets, and what becomes of what it returns."""

from __future__ import annotations

import inspect
import json
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_gspo.user_code import UserCodeError, load_function


@dataclass(frozen=True)
class AgentTask:
    """What a function of `agents.function` gets.

    prompt, answer, metadata: of the row of the data; answer is "" without one. base_url, key: for a
    client of OpenAI's APIs; anthropic_url: for one of Anthropic's. model: the name of the trained
    policy. directory: an empty one to work in, which is also the current one. index: of the prompt.
    sample: 0 .. n-1 within the group. seed: 62 bits that depend on the two and the step alone.
    """

    prompt: str
    base_url: str
    anthropic_url: str
    key: str
    directory: str
    index: int
    sample: int
    seed: int
    model: str = "policy"
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def load_agent(name: str) -> Callable[[AgentTask], Any]:
    """The function of `agents.function`. Raises UserCodeError."""
    location = name.rpartition(":")[0]
    if location.endswith(".py"):  # so that it can import its neighbours at any time
        sys.path.insert(0, str(Path(location).resolve().parent))
    return load_function(name, "agents.function =", UserCodeError)


def play_task(function: Callable[[AgentTask], Any], task: AgentTask) -> None:
    """Call the function, which may be a coroutine, and post the reward that it returns."""
    result = function(task)
    if inspect.isawaitable(result):
        import asyncio  # a run of a function that needs none starts in half the time

        result = asyncio.run(_awaited(result))
    if result is not None:
        post_reward(task, float(result))


async def _awaited(result: Any) -> Any:
    return await result


def post_reward(task: AgentTask, reward: float) -> None:
    """Send the run's reward to the endpoint."""
    request = urllib.request.Request(
        f"{task.base_url}/reward",
        json.dumps({"reward": reward}).encode(),
        {"Authorization": f"Bearer {task.key}", "Content-Type": "application/json"},
    )
    # The endpoint is no place that a proxy reaches.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request):
        pass
