"""The existing engines as `Generator`s: the embedded engine, and inference servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_gspo.agents.generation import CallLimits, Generation, truncated
from megatron_gspo.agents.rounds import Rounds
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.batched_calls import BatchedCalls
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.server_engine.open_group import oldest
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator


class ServerGenerator:
    """A `Generator` on the servers of a client, in whose event loop it is called.

    A request that fails is repeated, on another server if there is one, and a weight update
    interrupts it, as for other responses. It is an `OpenRun` of what is not delivered yet.
    """

    def __init__(self, client: ResponseGenerator, sampling: SamplingParams) -> None:
        """sampling: without its limits."""
        self._client = client
        self._sampling = sampling
        self._in_flight: list[PartialResponse] = []
        self._cancelled_tokens = 0

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens of replies in flight; None without any."""
        return oldest([response.oldest_version for response in self._in_flight])

    @property
    def num_tokens(self) -> int:
        """Tokens of replies that were cancelled or are in flight."""
        return self._cancelled_tokens + sum(response.num_tokens for response in self._in_flight)

    @property
    def paused_seconds(self) -> float:
        """See `Generator.paused_seconds`."""
        return self._client.pool.paused_seconds

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        sampling = _single(self._sampling, limits.max_tokens)
        response = PartialResponse(Prompt(seed, prompt, ""), 0, limits.max_tokens)
        self._in_flight.append(response)
        try:
            await self._client.generate(response, sampling, 0, None)
        except asyncio.CancelledError:
            self._cancelled_tokens += response.num_tokens
            raise
        finally:
            self._in_flight.remove(response)
        return _generation(response.to_sample(self._client.model, lambda ids: ""), routes_start)


@dataclass(frozen=True)
class _Call:
    prompt: np.ndarray
    limits: CallLimits
    seed: int
    routes_start: int


class EngineGenerator:
    """A `Generator` on an engine in this process, which draws the replies to waiting calls in
    batches.

    Draws do not depend on the batch, except for the rounding of matrix products of other shapes;
    with `max_batch` 1, or in rounds, a call has the same bits whenever it comes.

    has_versions: whether the engine tells the weight versions of tokens.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        *,
        seed: int,
        max_batch: int = 16,
        rounds: Rounds | None = None,
        max_length: int = 0,
    ) -> None:
        """sampling: without its limits. seed: of the rollout. rounds: of the runs that call, which
        make the batches in place of `max_batch`. max_length: tokens of prompt and reply up to which
        calls of other limits are drawn together, and cut."""
        self.has_versions = False
        self._engine = engine
        self._sampling = sampling
        self._rounds = rounds
        self._seed = seed
        self._max_length = max_length
        self._calls = BatchedCalls(self._replies, "agent-engine", max_batch=max_batch)

    @property
    def paused_seconds(self) -> float:
        """See `Generator.paused_seconds`: the trainer waits for the runs."""
        return 0.0

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        call = _Call(prompt, limits, seed, routes_start)
        if self._rounds is not None:
            return await self._rounds.call(self._replies, call)
        return await self._calls.call(call)

    def close(self) -> None:
        """Draw no more replies; the engine stays open."""
        self._calls.close()

    def _replies(self, calls: Sequence[_Call]) -> list[Generation]:
        replies: dict[int, Generation] = {}
        for indices, max_tokens in _batches(calls, self._max_length):
            prompts = [Prompt(calls[i].seed, calls[i].prompt, "") for i in indices]
            sampling = _single(self._sampling, max_tokens)
            samples = self._engine.generate(prompts, sampling, seed=self._seed)
            check_samples(samples, prompts, sampling)
            for i, sample in zip(indices, samples, strict=True):
                self.has_versions |= sample.token_versions is not None
                generation = _generation(sample, calls[i].routes_start)
                replies[i] = truncated(generation, calls[i].limits.max_tokens, "length")
        return [replies[i] for i in range(len(calls))]


def _batches(calls: Sequence[_Call], max_length: int) -> list[tuple[list[int], int]]:
    """(indices, limit) of calls that are drawn together.

    limit: the largest of their limits. No call exceeds max_length with it, except by its own limit.
    """
    waiting = sorted(range(len(calls)), key=lambda i: (-calls[i].limits.max_tokens, i))
    batches = []
    while waiting:
        limit = calls[waiting[0]].limits.max_tokens
        fits = [
            i
            for i in waiting
            if calls[i].limits.max_tokens == limit or len(calls[i].prompt) + limit <= max_length
        ]
        batches.append((sorted(fits), limit))
        chosen = set(fits)
        waiting = [i for i in waiting if i not in chosen]
    return batches


def _single(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(sampling, n_samples_per_prompt=1, max_response_length=max_tokens)


def _generation(sample: Sample, routes_start: int) -> Generation:
    versions = sample.token_versions
    if versions is None:
        versions = np.full(sample.response_length, sample.weight_version, dtype=np.int32)
    routes = sample.routed_experts
    missing = sample.missing_routes
    return Generation(
        tokens=sample.response_ids,
        log_probs=sample.rollout_log_probs,
        versions=versions,
        finish_reason=sample.finish_reason,
        routes=None if routes is None else routes[routes_start:],
        missing_routes=None if missing is None else missing[routes_start:],
    )
