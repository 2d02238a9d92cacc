"""Episodes of environments: an environment is an agent in this process.

Its run has the calls, the tree and the sample of any agent's. An environment without tools reads
and writes text: the sample's response is `response 1, observation 1, response 2, ...` and ends with
a response. An observation is tokenised by itself, without special tokens, and masked. With tools the
episode is a conversation in the model's format.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from megatron_gspo.agents.agent_host import OpenRun, RunRequest, single_error
from megatron_gspo.agents.agent_run import AgentRun, RunLimits
from megatron_gspo.agents.agent_session import Outcome, finished_run
from megatron_gspo.agents.agent_source import run_requests
from megatron_gspo.agents.conversation import Call, CallError, Message, Tool, invalid_request
from megatron_gspo.agents.dialects import chat
from megatron_gspo.agents.engine_generators import EngineGenerator
from megatron_gspo.agents.generation import Generator
from megatron_gspo.agents.rendering import Rendering
from megatron_gspo.agents.reply_parsing import ParsedReply
from megatron_gspo.agents.rounds import Rounds
from megatron_gspo.agents.run_samples import run_sample
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.environments.environment import Response, StepRequest
from megatron_gspo.errors import InputError
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rollout.batched_calls import BatchedCalls
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.wrapped_engine import WrappedEngine

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""
Decode = Callable[[list[int]], str]
"""Token ids of a response to its text."""
Step = Callable[[StepRequest], Awaitable[Reply]]
"""An environment's reply."""


class Environments(Protocol):
    """What episodes need of an `EnvironmentPool`."""

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]: ...


class TextRendering:
    """`Rendering` of texts as they are, behind a tokenised prompt."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, prompt: np.ndarray, encode: Encode, decode: Decode) -> None:
        """prompt: [P] int64."""
        self._prompt = prompt
        self._encode = encode
        self._decode = decode

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """The prompt, which is the first message."""
        return self._prompt

    def extend(
        self,
        prompt: np.ndarray,
        reply: np.ndarray,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> np.ndarray:
        """See `Rendering.extend`."""
        text = "".join(message.content for message in new)
        return np.concatenate([prompt, reply, np.array(self._encode(text), dtype=np.int64)])

    def parse(
        self, prompt: np.ndarray, reply: np.ndarray, tools: Sequence[Tool], *, calls_tools: bool
    ) -> ParsedReply:
        """See `Rendering.parse`."""
        return ParsedReply(self._decode(reply.tolist()))

    def text(self, tokens: np.ndarray) -> str:
        """See `Rendering.text`."""
        return self._decode(tokens.tolist())


class EpisodeHost:
    """`RunHost` whose runs are episodes. Steps of environments that are due at the same time run
    together, in the environments' workers."""

    def __init__(
        self,
        environments: Environments,
        limits: RunLimits,
        encode: Encode,
        decode: Decode,
        conversation: Callable[[], Rendering],
        *,
        branches: bool = True,
    ) -> None:
        """limits: of a conversation, and calls and their length in any episode. conversation: the
        rendering for environments with tools; it raises InputError where the config or the
        tokenizer has none. branches: whether a conversation may have several."""
        self.limits = limits
        self._branches = branches
        self._environments = environments
        self._encode = encode
        self._decode = decode
        self._conversation = conversation
        self._steps = BatchedCalls(environments.step, "environments")

    async def samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_response_length: int,
        /,
        *,
        opened: list[OpenRun] | None = None,
        rounds: Rounds | None = None,
    ) -> list[Sample]:
        """Play episodes at the same time; their samples, in order.

        max_response_length: tokens of all responses and observations of an episode. opened: gets
        the runs as they begin. rounds: in which they go on together. Raises what the generator
        raises.
        """
        opened = [] if opened is None else opened
        async with asyncio.TaskGroup() as group:
            episodes = [
                group.create_task(
                    self._sample(request, generator, max_response_length, opened, rounds)
                )
                for request in requests
            ]
        return [episode.result() for episode in episodes]

    async def close(self) -> None:
        """Step no more. May be called again."""
        self._steps.close(wait=False)

    async def _sample(
        self,
        request: RunRequest,
        generator: Generator,
        max_response_length: int,
        opened: list[OpenRun],
        rounds: Rounds | None,
    ) -> Sample:
        async def step(step_request: StepRequest) -> Reply:
            if rounds is None:
                return await self._steps.call(step_request)
            return await rounds.call(self._environments.step, step_request)

        prompt = request.prompt
        unopened = StepRequest(prompt, request.sample_index, _environment_seed(request), ())
        first_reply = await step(unopened)
        opening = first_reply.value if first_reply.status == "ok" else {}
        tools = opening.get("tools")
        limits = replace(
            self.limits, max_call_length=min(self.limits.max_call_length, max_response_length)
        )
        rendering: Rendering
        if tools is not None:
            rendering = self._conversation()
        else:
            rendering = TextRendering(prompt.token_ids, self._encode, self._decode)
            length = prompt.length + max_response_length
            limits = replace(limits, max_context=length, max_run_tokens=length)
        number = 0  # of an address, which it does not have
        run = AgentRun(number, request.run_seed, limits, rendering, generator)
        opened.append(run)
        outcome = Outcome(math.nan, first_reply.failure)
        if first_reply.status == "ok":
            messages = opening.get("messages") or [{"role": "user", "content": prompt.text}]
            try:
                outcome = await _play(run, unopened, messages, tools, step)
            finally:
                run.end()
        if rounds is not None:
            rounds.end_run()  # not if it has failed, which ends all of them
        finished = finished_run(run, outcome)
        if len(finished.rows) > 1 and not self._branches:
            raise InputError(
                "rollout.environment: the messages of an episode do not continue each other, and"
                " the values of one sequence say nothing of its branches; append to the messages,"
                " or use an objective without a value model"
            )
        return run_sample(prompt, request.sample_index, finished, has_messages=tools is not None)


class EpisodeEngine(WrappedEngine):
    """`RolloutEngine` whose samples are episodes, played in rounds on another one: each round
    generates a response for every episode that goes on, then steps its environment. So a batch of
    the engine has the same responses whenever a step of an environment ends."""

    def __init__(self, engine: RolloutEngine, host: EpisodeHost) -> None:
        super().__init__(engine)
        self._host = host

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """`sampling.n_samples_per_prompt` episodes per prompt; `max_response_length` limits all
        responses and observations of an episode together."""
        requests = run_requests(prompts, sampling, seed)
        rounds = Rounds(len(requests))
        generator = EngineGenerator(
            self.engine,
            sampling,
            rounds=rounds,
            seed=seed,
            max_length=self._host.limits.max_context,
        )
        with single_error():
            samples = asyncio.run(
                self._host.samples(requests, generator, sampling.max_response_length, rounds=rounds)
            )
        if generator.has_versions:
            return samples
        return [replace(sample, token_versions=None) for sample in samples]

    def close(self) -> None:
        """Close the engine; see `EpisodeHost.close`."""
        asyncio.run(self._host.close())
        super().close()


async def _play(
    run: AgentRun,
    unopened: StepRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    step: Step,
) -> Outcome:
    """Play an episode to its end. Its reward is the sum of those of its turns; NaN if the environment
    has failed, or the engine has aborted a response.

    tools: None for an episode of text.
    """
    try:
        return await _take_turns(run, unopened, messages, tools, step)
    except CallError as error:
        if run.failure is not None:
            raise run.failure from None
        if error.is_limit and run.tree.delivered:
            return Outcome(sum(run.turn_rewards.values()), is_cut=True)
        return Outcome(math.nan, f"invalid: {error}")


async def _take_turns(
    run: AgentRun,
    unopened: StepRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    step: Step,
) -> Outcome:
    """See `_play`. Raises CallError where a limit is reached or messages are not valid."""
    call = _new_call(messages, tools)
    responses: list[Response] = []
    while True:
        reply = await run.ask(call)
        if reply.finish_reason == "abort":
            return Outcome(math.nan)
        message = chat.response_body(call, reply)["choices"][0]["message"]
        responses.append(message["content"] if tools is None else message)
        stepped = await step(replace(unopened, responses=tuple(responses)))
        if stepped.failure:
            return Outcome(math.nan, stepped.failure)
        turn = stepped.value
        run.set_reward(turn["reward"], reply.id)
        if turn["done"]:
            return Outcome(sum(run.turn_rewards.values()))
        if turn.get("messages") is not None:
            call = _new_call(turn["messages"], tools)
        else:
            observed = chat.parse_messages(_observed(turn["observation"], message))
            call = replace(call, messages=(*call.messages, reply.message, *observed))


def _new_call(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> Call:
    return chat.parse_call({"messages": [*messages], "tools": [*(tools or ())]})


def _observed(
    observation: str | Sequence[Mapping[str, Any]], message: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """The messages of an observation of this message of the policy."""
    if not isinstance(observation, str):
        return observation
    calls = message.get("tool_calls", ())
    if not calls:
        return [{"role": "user", "content": observation}]
    if len(calls) > 1:
        raise invalid_request(
            f"the response has {len(calls)} tool calls and the observation is a text; give a list"
            " with a message for each"
        )
    return [{"role": "tool", "content": observation, "tool_call_id": calls[0]["id"]}]


def _environment_seed(request: RunRequest) -> int:
    """32 bits that depend on (seed, prompt, sample) alone."""
    source = np.random.SeedSequence([request.seed, request.prompt.index, request.sample_index])
    return int(source.generate_state(1)[0])
