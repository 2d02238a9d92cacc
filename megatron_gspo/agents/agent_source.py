"""Groups whose samples are runs of agents, over an engine in the ranks or over servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from megatron_gspo.agents.agent_host import OpenRun, RunRequest, single_error
from megatron_gspo.agents.agent_process import AgentProcess
from megatron_gspo.agents.engine_generators import EngineGenerator, ServerGenerator
from megatron_gspo.agents.generation import Generator
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.server_engine.open_group import OpenGroup, oldest
from megatron_gspo.rollout.server_engine.response_generator import ResponseGenerator
from megatron_gspo.rollout.wrapped_engine import WrappedEngine
from megatron_gspo.servers.http_client import EventLoop


def run_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> list[RunRequest]:
    """`sampling.n_samples_per_prompt` runs per prompt, prompt-major."""
    samples = range(sampling.n_samples_per_prompt)
    return [RunRequest(prompt, i, seed) for prompt in prompts for i in samples]


class AgentEngine(WrappedEngine):
    """`RolloutEngine` whose samples are runs, over one in this process that draws the replies."""

    def __init__(self, engine: RolloutEngine, host: RunHost, *, max_batch: int) -> None:
        """max_batch: replies that are drawn together."""
        super().__init__(engine)
        self.host = host
        self._max_batch = max_batch
        self._loop = EventLoop()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """`sampling.n_samples_per_prompt` runs per prompt; `max_response_length` limits a reply."""
        generator = EngineGenerator(self.engine, sampling, seed=seed, max_batch=self._max_batch)
        requests = run_requests(prompts, sampling, seed)
        playing = self.host.samples(requests, generator, sampling.max_response_length)
        try:
            with single_error():
                return self._loop.run(playing)
        finally:
            generator.close()

    def close(self) -> None:
        """End all runs, and close the engine."""
        self._loop.run(self.host.close())
        self._loop.close()
        super().close()


class RunHost(Protocol):
    """What plays runs: `AgentProcess`, or `EpisodeHost` where the agents are environments."""

    async def samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_response_length: int,
        /,
        *,
        opened: list[OpenRun] | None = None,
    ) -> list[Sample]:
        """See `AgentHost.samples`."""
        ...

    async def close(self) -> None:
        """See `AgentHost.close`."""
        ...


class AgentGroups:
    """`GroupKind` whose samples are runs of agents, for which the process that hosts them makes the
    requests."""

    def __init__(self, process: AgentProcess) -> None:
        self.elsewhere = process

    def open(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> OpenGroup:
        """See `GroupKind.open`."""
        requests = run_requests([prompt], sampling, seed)
        runs: list[OpenRun] = []
        return RunGroup(runs, partial(self.elsewhere.samples_of_servers, requests, sampling, runs))

    async def close(self) -> None:
        """See `GroupKind.close`."""
        await self.elsewhere.close()


class HostedGroups:
    """`GroupKind` whose samples are runs of a host in this process."""

    elsewhere = None

    def __init__(self, host: RunHost) -> None:
        self._host = host

    def open(
        self, client: ResponseGenerator, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> OpenGroup:
        """See `GroupKind.open`."""
        requests = run_requests([prompt], sampling, seed)
        generator = ServerGenerator(client, sampling)
        runs: list[OpenRun] = [generator]
        length = sampling.max_response_length
        play = partial(self._host.samples, requests, generator, length, opened=runs)
        return RunGroup(runs, play)

    async def close(self) -> None:
        """See `GroupKind.close`."""
        await self._host.close()


class RunGroup:
    """The runs of one prompt."""

    def __init__(self, runs: list[OpenRun], play: Callable[[], Awaitable[list[Sample]]]) -> None:
        """runs: what they have so far. play: returns their samples, in order."""
        self._runs = runs
        self._play = play
        self._samples: list[Sample] = []

    @property
    def oldest_version(self) -> int | None:
        """See `OpenGroup.oldest_version`."""
        return oldest([run.oldest_version for run in self._runs])

    async def play(self) -> None:
        """See `OpenGroup.play`."""
        with single_error():
            self._samples = await self._play()

    def samples(self) -> list[Sample]:
        """See `OpenGroup.samples`."""
        return self._samples

    def discard(self) -> int:
        """See `OpenGroup.discard`."""
        tokens = sum(run.num_tokens for run in self._runs)
        self._runs.clear()
        return tokens
