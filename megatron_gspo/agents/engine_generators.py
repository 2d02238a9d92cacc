"""The existing engines as `Generator`s: the embedded engine, and inference servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_gspo.agents.generation import CallLimits, Generation
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
    interrupts it, as for other responses.
    """

    def __init__(self, client: ResponseGenerator, sampling: SamplingParams) -> None:
        """sampling: without its limits."""
        self._client = client
        self._sampling = sampling
        self._in_flight: list[PartialResponse] = []

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens of replies in flight; None without any."""
        return oldest([response.oldest_version for response in self._in_flight])

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
    with `max_batch` 1 a call has the same bits whatever else is waiting.
    """

    def __init__(
        self, engine: RolloutEngine, sampling: SamplingParams, *, max_batch: int = 16
    ) -> None:
        """sampling: without its limits."""
        self._engine = engine
        self._sampling = sampling
        self._calls = BatchedCalls(self._replies, "agent-engine", max_batch=max_batch)

    @property
    def paused_seconds(self) -> float:
        """See `Generator.paused_seconds`: the trainer waits for the runs."""
        return 0.0

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        return await self._calls.call(_Call(prompt, limits, seed, routes_start))

    def close(self) -> None:
        """Draw no more replies; the engine stays open."""
        self._calls.close()

    def _replies(self, calls: Sequence[_Call]) -> list[Generation]:
        replies: dict[int, Generation] = {}
        for max_tokens in {call.limits.max_tokens for call in calls}:
            indices = [i for i, call in enumerate(calls) if call.limits.max_tokens == max_tokens]
            prompts = [Prompt(calls[i].seed, calls[i].prompt, "") for i in indices]
            sampling = _single(self._sampling, max_tokens)
            samples = self._engine.generate(prompts, sampling, seed=0)
            check_samples(samples, prompts, sampling)
            for i, sample in zip(indices, samples, strict=True):
                replies[i] = _generation(sample, calls[i].routes_start)
        return [replies[i] for i in range(len(calls))]


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
