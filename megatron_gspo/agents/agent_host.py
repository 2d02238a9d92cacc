"""The runs of a rank: its endpoint, and who plays and scores them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_gspo.agents.agent_run import AgentRun, RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.generation import Generator
from megatron_gspo.agents.players import Player
from megatron_gspo.agents.run_samples import run_sample
from megatron_gspo.agents.run_verifier import RunVerifier
from megatron_gspo.data.sample import Prompt, Sample, json_able


@dataclass(frozen=True)
class RunRequest:
    """A run to play. seed: of the rollout."""

    prompt: Prompt
    sample_index: int
    seed: int

    @property
    def run_seed(self) -> int:
        """62 bits that depend on (seed, prompt, sample) alone."""
        source = np.random.SeedSequence([self.seed, self.prompt.index, self.sample_index])
        return int(source.generate_state(1, np.uint64)[0]) >> 2

    @property
    def task(self) -> dict[str, Any]:
        """What the agent may know of it, JSON-able; see `AgentTask`."""
        prompt = self.prompt
        return {
            "prompt": prompt.text,
            "answer": prompt.answer or "",
            "metadata": json_able(prompt.metadata),
            "index": prompt.index,
            "sample": self.sample_index,
            "seed": self.run_seed,
        }


class OpenRun(Protocol):
    """What a run, or several, have so far: tokens of delivered replies, and the oldest weight
    version among the trained ones, None without any."""

    @property
    def oldest_version(self) -> int | None: ...

    @property
    def num_tokens(self) -> int: ...


class AgentHost:
    """See the module. Coroutines run in one event loop, in which the endpoint listens."""

    def __init__(
        self,
        endpoint: AgentEndpoint,
        player: Player,
        limits: RunLimits,
        *,
        concurrent_runs: int,
        verifier: RunVerifier | None = None,
    ) -> None:
        """endpoint: is started with the first runs. limits: `max_call_length` is that of the
        sampling instead. concurrent_runs: that are played, or may be claimed, at the same time.
        verifier: scores the runs; None: their agents do."""
        self._endpoint = endpoint
        self._is_listening = False
        self._starting = asyncio.Lock()
        self._player = player
        self._limits = limits
        self._verifier = verifier
        self._free = asyncio.Semaphore(concurrent_runs)

    async def samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_call_length: int,
        *,
        opened: list[OpenRun] | None = None,
    ) -> list[Sample]:
        """Play runs at the same time; their samples, in order.

        max_call_length: tokens of a reply. opened: gets the runs as they begin; one that begins
        anew takes the place of the earlier.
        Raises what the generator raises: a run can't go on without its reply, so all are ended.
        """
        async with self._starting:
            if not self._is_listening:
                await self._endpoint.start()
                self._is_listening = True
        opened = [] if opened is None else opened
        limits = replace(self._limits, max_call_length=max_call_length)
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(self._sample(request, generator, limits, opened))
                for request in requests
            ]
        return [run.result() for run in runs]

    async def _sample(
        self,
        request: RunRequest,
        generator: Generator,
        limits: RunLimits,
        opened: list[OpenRun],
    ) -> Sample:
        run: AgentRun | None = None

        def open_run() -> AgentRun:
            nonlocal run
            if run is not None:
                opened.remove(run)
            run = self._endpoint.open_run(
                generator,
                limits,
                seed=request.run_seed,
                takes_rewards=self._verifier is None,
            )
            opened.append(run)
            return run

        async with self._free:
            finished = await self._player.play(
                self._endpoint,
                open_run,
                task=request.task,
                judge=None if self._verifier is None else self._verifier.judge_of(request.prompt),
            )
        return run_sample(request.prompt, request.sample_index, finished)

    async def close(self) -> None:
        """End all runs and the verifier, and stop listening. May be called again."""
        await self._endpoint.close()
        if self._verifier is not None:
            self._verifier.close()
        await self._player.close()


@contextlib.contextmanager
def single_error() -> Iterator[None]:
    """Raise the first error of a task group in its place."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
