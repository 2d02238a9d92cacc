"""The protocol of an environment for multi-turn episodes, and its steps with failures contained.

Imports no torch: environments run in worker processes as verifiers do.
"""

from __future__ import annotations

import copy
import json
import numbers
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import InputError
from megatron_gspo.rewards.worker import Reply, describe
from megatron_gspo.user_code import load_function

_MAX_LIVE = 1024  # environments kept by a process; the least recently used is dropped first
_MAX_REWARD = float(np.finfo(np.float32).max)

Response = str | Mapping[str, Any]
"""What the policy has replied: text, or with tools the message of the OpenAI API."""


class EnvironmentLoadError(InputError):
    """An environment that can't be loaded; one line with its name and the fix."""


@dataclass(frozen=True)
class Turn:
    """An environment's reply to a response.

    observation: text that the policy reads next, as it is (role marks included, where the model
    needs them). reward: of this response. done: the episode ends with this response; the
    observation is then not read.

    With tools `observation` is the content of a message, which answers the response's tool call or
    is the user's, or a list of messages; and `messages`, if given, are all that the policy reads
    next, in place of what it has read and of the observation.
    """

    observation: str | Sequence[Mapping[str, Any]] = ""
    reward: float = 0.0
    done: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None


class Environment(Protocol):
    """The environment of one episode.

    Its factory is `factory(prompt, *, sample_index, seed, **options) -> Environment`; `seed` is an
    int that depends on (run seed, step, prompt, sample) alone. The same responses must give the
    same turns: an environment may be built again and its responses repeated. `close()`, if it has
    one, is called when the environment is dropped.

    `tools`, if it has them, is a list of definitions of the OpenAI API, which may be empty. The
    episode is then a conversation of messages in the model's format. It begins with `messages`, or
    with the prompt as the user's message, and `step` takes the assistant's message, with parsed
    tool calls.
    """

    def step(self, response: Any) -> Turn: ...


@dataclass(frozen=True)
class StepRequest:
    """The input of one step of an episode.

    responses: all so far; the last one is the one to reply to. Without any, the reply is the
    opening of the episode.
    """

    prompt: Prompt
    sample_index: int
    seed: int
    responses: tuple[Response, ...]

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
        """The fields of a `Turn` as the value, or the status "invalid" or "error".

        The fields of an opening are `tools` and `messages`; it has none without tools. Never
        raises.
        """
        try:
            if request.responses:
                fields, fault = self._step(request)
            else:
                fields, fault = _opening(self._environment_of(request).environment)
        except (Exception, SystemExit) as error:
            self._forget(request.episode)
            return Reply("error", message=describe(error))
        if fault:
            self._forget(request.episode)
            return Reply("invalid", message=fault)
        if fields.get("done"):
            self._forget(request.episode)
        return Reply("ok", fields)

    def _step(self, request: StepRequest) -> tuple[dict[str, Any], str]:
        """The fields of the turn after the last response, and why it is none. A new environment has
        the earlier responses repeated."""
        live = self._environment_of(request)
        turn = Turn()
        for response in request.responses[live.num_responses :]:
            # Copies: an environment in this process may change the messages that it has.
            turn = live.environment.step(copy.deepcopy(response))
        live.num_responses = len(request.responses)
        fault = _fault(turn, has_messages=not isinstance(request.responses[-1], str))
        if fault:
            return {}, fault
        fields: dict[str, Any] = {
            "observation": copy.deepcopy(turn.observation),
            "reward": float(turn.reward),
            "done": bool(turn.done),
        }
        if turn.messages is not None:
            fields["messages"] = copy.deepcopy(turn.messages)
        return fields, ""

    def _environment_of(self, request: StepRequest) -> _LiveEnvironment:
        """The environment that has had the earlier responses, or a new one."""
        episode = request.episode
        num_earlier = max(len(request.responses) - 1, 0)
        if episode in self._live and self._live[episode].num_responses != num_earlier:
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
        return self._live[episode]

    def _forget(self, episode: tuple[int, int, int]) -> None:
        live = self._live.pop(episode, None)
        close = getattr(live.environment, "close", None) if live is not None else None
        if close is not None:
            try:
                close()
            except Exception:  # the episode is over
                pass


def _opening(environment: Environment) -> tuple[dict[str, Any], str]:
    """The fields of the opening, and what is wrong with it."""
    tools = getattr(environment, "tools", None)
    if not _are_objects(tools):  # without tools, or something of the environment's own
        return {}, ""
    messages = getattr(environment, "messages", None)
    if messages is None:
        return {"tools": tools}, ""
    if not _are_objects(messages):
        return {}, "the environment's messages are no list of JSON objects"
    return {"tools": tools, "messages": copy.deepcopy(messages)}, ""


def _fault(turn: object, *, has_messages: bool) -> str:
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
    if not isinstance(observation, str) and not (has_messages and _are_objects(observation)):
        more = " or a list of messages, which are JSON objects" if has_messages else ""
        return f"the environment's observation is a {type(observation).__name__}; give text{more}"
    if turn.messages is not None and not (has_messages and _are_objects(turn.messages)):
        why = "are no list of JSON objects" if has_messages else "need tools, [] for none"
        return f"the turn's messages {why}"
    if not isinstance(reward, (numbers.Real, np.bool_)) or not abs(float(reward)) <= _MAX_REWARD:
        return f"the environment's reward is {reward!r}; give a finite number (float32)"
    if not isinstance(done, (bool, np.bool_)):
        return f"the environment's done is {done!r}; give True or False"
    return ""


def _are_objects(values: object) -> bool:
    """Whether these are a list of JSON objects."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(item, dict) for item in values):
        return False
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def load_environments(name: str, options: dict[str, Any] | None = None) -> Environments:
    """Environments of the factory "path/to/file.py:factory" or "package.module:factory".

    options: keyword arguments of every call. Raises EnvironmentLoadError in one line.
    """
    return Environments(load_function(name, "environment", EnvironmentLoadError), options)
