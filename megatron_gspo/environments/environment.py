"""The protocol of an environment for multi-turn episodes, and its steps with failures contained.

Imports no torch: environments run in worker processes as verifiers do.
"""

from __future__ import annotations

import numbers
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import InputError
from megatron_gspo.rewards.worker import Reply, describe
from megatron_gspo.user_code import load_function

_MAX_LIVE = 1024  # environments kept by a process; the least recently used is dropped first
_MAX_REWARD = float(np.finfo(np.float32).max)


class EnvironmentLoadError(InputError):
    """An environment that can't be loaded; one line with its name and the fix."""


@dataclass(frozen=True)
class Turn:
    """An environment's reply to a response.

    observation: text that the policy reads next, as it is (role marks included, where the model
    needs them). reward: of this response. done: the episode ends with this response; the
    observation is then not read.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """The environment of one episode.

    Its factory is `factory(prompt, *, sample_index, seed, **options) -> Environment`; `seed` is an
    int that depends on (run seed, step, prompt, sample) alone. The same responses must give the
    same turns: an environment may be built again and its responses repeated. `close()`, if it has
    one, is called when the environment is dropped.
    """

    def step(self, response: str) -> Turn: ...


@dataclass(frozen=True)
class StepRequest:
    """The input of one step of an episode.

    responses: all so far; the last one is the one to reply to.
    """

    prompt: Prompt
    sample_index: int
    seed: int
    responses: tuple[str, ...]

    @property
    def episode(self) -> tuple[int, int, int]:
        return self.prompt.index, self.sample_index, self.seed


@dataclass
class _LiveEnvironment:
    """An environment, and how many responses it has had."""

    environment: Environment
    num_responses: int = 0


class Environments:
    """The live environments of one process."""

    def __init__(
        self, factory: Callable[..., Environment], options: dict[str, Any] | None = None
    ) -> None:
        self._factory = factory
        self._options = options or {}
        self._live: OrderedDict[tuple[int, int, int], _LiveEnvironment] = OrderedDict()

    def answer(self, request: StepRequest) -> Reply:
        """("ok", the fields of a Turn, None), or ("invalid" or "error", None, why).

        Never raises.
        """
        try:
            turn = self._step(request)
            fault = _fault(turn)
        except (Exception, SystemExit) as error:
            self._forget(request.episode)
            return "error", None, describe(error)
        if fault:
            self._forget(request.episode)
            return "invalid", None, fault
        if turn.done:
            self._forget(request.episode)
        fields = {
            "observation": turn.observation,
            "reward": float(turn.reward),
            "done": bool(turn.done),
        }
        return "ok", fields, None

    def _step(self, request: StepRequest) -> Turn:
        """The turn after the last response. A new environment has the earlier ones repeated."""
        episode = request.episode
        count = len(request.responses)
        if episode in self._live and self._live[episode].num_responses != count - 1:
            self._forget(episode)
        if episode not in self._live:
            environment = self._factory(
                request.prompt,
                sample_index=request.sample_index,
                seed=request.seed,
                **self._options,
            )
            self._live[episode] = _LiveEnvironment(environment)
        self._live.move_to_end(episode)
        while len(self._live) > _MAX_LIVE:
            self._forget(next(iter(self._live)))
        live = self._live[episode]
        turn = Turn()
        for response in request.responses[live.num_responses :]:
            turn = live.environment.step(response)
        live.num_responses = count
        return turn

    def _forget(self, episode: tuple[int, int, int]) -> None:
        live = self._live.pop(episode, None)
        close = getattr(live.environment, "close", None) if live is not None else None
        if close is not None:
            try:
                close()
            except Exception:  # the episode is over
                pass


def _fault(turn: object) -> str:
    """Why this is no turn; "" if it is one."""
    if not isinstance(turn, Turn):
        return (
            f"the environment returned a {type(turn).__name__}; return"
            " megatron_gspo.environments.environment.Turn"
        )
    # A user's environment may have put anything there.
    observation: object = turn.observation
    reward: object = turn.reward
    done: object = turn.done
    if not isinstance(observation, str):
        return f"the environment's observation is a {type(observation).__name__}; give text"
    if not isinstance(reward, (numbers.Real, np.bool_)) or not abs(float(reward)) <= _MAX_REWARD:
        return f"the environment's reward is {reward!r}; give a finite number (float32)"
    if not isinstance(done, (bool, np.bool_)):
        return f"the environment's done is {done!r}; give True or False"
    return ""


def load_environments(name: str, options: dict[str, Any] | None = None) -> Environments:
    """Environments of the factory "path/to/file.py:factory" or "package.module:factory".

    options: keyword arguments of every call. Raises EnvironmentLoadError in one line.
    """
    return Environments(load_function(name, "environment", EnvironmentLoadError), options)
