"""The runs of a rank: its endpoint, the programs that it starts, and who scores them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gspo.agents.agent_run import AgentRun, RunLimits
from megatron_gspo.agents.agent_session import play
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.generation import Generator
from megatron_gspo.agents.rendering import Rendering
from megatron_gspo.agents.run_samples import run_sample
from megatron_gspo.agents.run_verifier import RunVerifier
from megatron_gspo.agents.runner import Program
from megatron_gspo.data.sample import Prompt, Sample, json_able
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)


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


class AgentHost:
    """See the module. Coroutines run in one event loop, in which the endpoint listens."""

    def __init__(
        self,
        rendering: Rendering,
        program: Program,
        limits: RunLimits,
        *,
        concurrent_runs: int,
        listen: str = "127.0.0.1",
        verifier: RunVerifier | None = None,
    ) -> None:
        """limits: `max_call_length` is that of the sampling instead. concurrent_runs: programs at
        the same time. listen: see `AgentEndpoint`. verifier: scores the runs; None: their
        agents do."""
        self._endpoint = AgentEndpoint(rendering, listen=listen, log=logger.info)
        self._is_listening = False
        self._starting = asyncio.Lock()
        self._program = program
        self._limits = limits
        self._verifier = verifier
        self._free = asyncio.Semaphore(concurrent_runs)
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-gspo-agents-"))
        self._numbers = itertools.count()

    async def samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_call_length: int,
        *,
        opened: list[AgentRun] | None = None,
    ) -> list[Sample]:
        """Play runs at the same time; their samples, in order.

        max_call_length: tokens of a reply. opened: gets the runs as they begin. Raises what the
        generator raises: a run can't go on without its reply, so all are ended.
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
        opened: list[AgentRun],
    ) -> Sample:
        async with self._free:
            run = self._endpoint.open_run(
                generator, limits, seed=request.run_seed, takes_rewards=self._verifier is None
            )
            opened.append(run)
            finished = await play(
                self._endpoint,
                run,
                self._program,
                self._folder / f"run-{next(self._numbers)}",
                task=request.task,
                judge=None if self._verifier is None else self._verifier.judge_of(request.prompt),
            )
        if run.failure is not None:
            raise run.failure
        return run_sample(request.prompt, request.sample_index, finished)

    async def close(self) -> None:
        """End all runs and the verifier, and stop listening. May be called again."""
        await self._endpoint.close()
        await self._program.close()
        if self._verifier is not None:
            self._verifier.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
