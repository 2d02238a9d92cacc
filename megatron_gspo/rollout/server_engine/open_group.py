"""What the requests of a prompt's group are: one response a sample, or samples that take several
responses each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.server_engine.following_client import ClientElsewhere
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_engine.server_pool import PooledServer


class OpenGroup(Protocol):
    """The samples of one prompt, on their way. Everything but `samples` is called in the event loop
    of the client."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens so far; None if there are none."""
        ...

    async def play(self) -> None:
        """Generate until all samples are finished.

        Raises `EngineError` for a request that failed permanently.
        """
        ...

    def samples(self) -> list[Sample]:
        """The finished samples, in order."""
        ...

    def discard(self) -> int:
        """Forget what was generated; returns the number of its tokens."""
        ...


class GroupKind(Protocol):
    """Opens groups.

    elsewhere: the client that makes their requests in another process; None: the one that they are
    opened with does.
    """

    @property
    def elsewhere(self) -> ClientElsewhere | None: ...

    def open(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> OpenGroup:
        """A group that does not play yet.

        Raises ValueError for a prompt that the model can't take.
        """
        ...

    async def close(self) -> None:
        """Free what the groups share. May be called again."""
        ...


class ResponseGroups:
    """Each sample is one response."""

    elsewhere = None

    def open(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> OpenGroup:
        """See `GroupKind.open`."""
        check_prompts([prompt], sampling, client.model)
        return ResponseGroup(client, prompt, sampling, seed)

    async def close(self) -> None:
        """Nothing."""


RESPONSES: GroupKind = ResponseGroups()


class ResponseGroup:
    """The responses to one prompt; those after the first find it in a server's prefix cache."""

    def __init__(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> None:
        self._client = client
        self._prompt = prompt
        self._sampling = sampling
        self._seed = seed
        self._responses = [
            PartialResponse(prompt, i, sampling.max_response_length)
            for i in range(sampling.n_samples_per_prompt)
        ]

    @property
    def oldest_version(self) -> int | None:
        """See `OpenGroup.oldest_version`."""
        return oldest([response.oldest_version for response in self._responses])

    async def play(self) -> None:
        """See `OpenGroup.play`."""
        preferred: PooledServer | None = None
        if len(self._responses) > 1:
            preferred = await self._client.prefill(self._prompt.token_ids.tolist())
        await asyncio.gather(
            *(
                self._client.generate(response, self._sampling, self._seed, preferred)
                for response in self._responses
            )
        )

    def samples(self) -> list[Sample]:
        """See `OpenGroup.samples`."""
        return [
            response.to_sample(self._client.model, self._client.decode)
            for response in self._responses
        ]

    def discard(self) -> int:
        """See `OpenGroup.discard`."""
        return sum(response.reset() for response in self._responses)


def oldest(versions: Sequence[int | None]) -> int | None:
    """The smallest version; None without any."""
    return min((version for version in versions if version is not None), default=None)


def check_prompts(prompts: Sequence[Prompt], sampling: SamplingParams, model: ServedModel) -> None:
    """Raise ValueError for prompts that the model can't take."""
    longest = model.shape.max_position_embeddings
    for prompt in prompts:
        prompt.check()
        if (largest := int(prompt.token_ids.max())) >= model.vocab_size:
            raise ValueError(
                f"prompt {prompt.index}: token id {largest} is outside the vocabulary of "
                f"{model.vocab_size}: use the model's own tokenizer"
            )
        if prompt.length + sampling.max_response_length > longest:
            raise ValueError(
                f"prompt {prompt.index}: {prompt.length} tokens + max_response_length="
                f"{sampling.max_response_length} exceed the {longest} positions of the model"
            )
