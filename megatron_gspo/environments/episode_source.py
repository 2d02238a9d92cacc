"""Groups of multi-turn episodes on inference servers.

In-process engines run them through `EpisodeEngine`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.environments.environment import StepRequest
from megatron_gspo.environments.episodes import (
    Encode,
    Environments,
    Episode,
    EpisodeRules,
    make_episodes,
)
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rollout.batched_calls import BatchedCalls
from megatron_gspo.rollout.server_engine.open_group import OpenGroup, oldest
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator


class EpisodeGroups:
    """`GroupKind` whose samples are episodes. Steps of environments that are due at the same time
    run together, in the environments' workers."""

    def __init__(self, environments: Environments, encode: Encode, rules: EpisodeRules) -> None:
        """encode: text to token ids. rules: limits of an episode."""
        self._encode = encode
        self._rules = rules
        self._steps = BatchedCalls(environments.step, "environments")

    def open(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> OpenGroup:
        """See `GroupKind.open`."""
        episodes = make_episodes([prompt], sampling, self._rules, self._encode, seed=seed)
        return EpisodeGroup(self, client, episodes, sampling, seed)

    async def close(self) -> None:
        """See `GroupKind.close`."""
        self._steps.close(wait=False)

    async def step(self, request: StepRequest) -> Reply:
        """An environment's reply."""
        return await self._steps.call(request)


class EpisodeGroup:
    """The episodes of one prompt; each continues as soon as its own response is finished."""

    def __init__(
        self,
        kind: EpisodeGroups,
        client: ResponseGenerator,
        episodes: list[Episode],
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        self._kind = kind
        self._client = client
        self._episodes = episodes
        self._sampling = sampling
        self._seed = seed
        self._responses: dict[Episode, PartialResponse] = {}

    @property
    def oldest_version(self) -> int | None:
        """See `OpenGroup.oldest_version`."""
        versions = [episode.oldest_version for episode in self._episodes]
        in_flight = [response.oldest_version for response in self._responses.values()]
        return oldest([*versions, *in_flight])

    async def play(self) -> None:
        """See `OpenGroup.play`."""
        await asyncio.gather(*map(self._play, self._episodes))

    async def _play(self, episode: Episode) -> None:
        while (request := episode.next_request()) is not None:
            sampling = replace(
                self._sampling, n_samples_per_prompt=1, max_response_length=request.limit
            )
            response = PartialResponse(request.prompt, 0, request.limit)
            self._responses[episode] = response
            await self._client.generate(response, sampling, self._seed, None)
            episode.add_response(response.to_sample(self._client.model, self._client.decode))
            del self._responses[episode]
            step = episode.step_request
            if step is not None:
                episode.add_reply(await self._kind.step(step))

    def samples(self) -> list[Sample]:
        """See `OpenGroup.samples`."""
        return [episode.sample() for episode in self._episodes]

    def discard(self) -> int:
        """See `OpenGroup.discard`."""
        in_flight = sum(response.reset() for response in self._responses.values())
        return in_flight + sum(episode.generated_length for episode in self._episodes)
