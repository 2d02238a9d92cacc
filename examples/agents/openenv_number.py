"""An environment of OpenEnv, and the policy as its player (docs/agent_packages.md).

uvicorn --app-dir examples/agents openenv_number:app    # one server for all runs

agents:
  function: examples/agents/openenv_number.py:run
  env: {ENVIRONMENT_URL: "http://127.0.0.1:8000"}

A row of the data: {"prompt": "Guess the whole number from 1 to 100.", "seed": 7}
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from openenv.core import GenericEnvClient
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from megatron_gspo.agents.agent_function import AgentTask

MAX_GUESSES = 8
MAX_SESSIONS = 1024  # at least `agents.concurrent_runs` times the ranks that start runs


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessNumber(Environment):
    """Reward 1 for the number, which depends on the seed alone; it ends after some guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._number = random.Random(seed).randint(1, 100)
        self._state = State(episode_id=episode_id)
        return Hint(text="Say a number.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.number == self._number:
            return Hint(text="right", done=True, reward=1.0)
        text = "too low" if action.number < self._number else "too high"
        return Hint(text=text, done=self._state.step_count == MAX_GUESSES, reward=0.0)

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessNumber, Guess, Hint, max_concurrent_envs=MAX_SESSIONS)


async def run(task: AgentTask) -> float:
    """The sum of the environment's rewards."""
    policy = AsyncOpenAI(base_url=task.base_url, api_key=task.key)
    total = 0.0
    async with GenericEnvClient(base_url=os.environ["ENVIRONMENT_URL"]) as environment:
        # The same for all runs of a row, which are compared with each other.
        result = await environment.reset(seed=task.metadata["seed"])
        content = f"{task.prompt} {result.observation['text']}"
        messages: list[Any] = [{"role": "user", "content": content}]
        while not result.done:
            try:
                completion = await policy.chat.completions.create(
                    model=task.model, messages=messages
                )
            except BadRequestError:
                break  # a limit of the run: the rewards until now count
            reply = completion.choices[0].message
            guess = re.findall(r"\d{1,9}", reply.content or "")[-1:] or ["0"]
            result = await environment.step({"number": int(guess[0])})
            total += result.reward or 0.0
            messages.append(reply.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": result.observation["text"]})
    return total
