"""Groups whose samples are runs of agents, over an engine in the ranks or over servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
from torch import Tensor

from megatron_gspo.agents.agent_host import AgentHost, RunRequest
from megatron_gspo.agents.engine_generators import EngineGenerator, ServerGenerator
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.group_source import GenerateOnCollect, Weights
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_source import ServerSource
from megatron_gspo.servers.http_client import EventLoop


def run_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> list[RunRequest]:
    """`sampling.n_samples_per_prompt` runs per prompt, prompt-major."""
    samples = range(sampling.n_samples_per_prompt)
    return [RunRequest(prompt, i, seed) for prompt in prompts for i in samples]


class AgentEngine:
    """`RolloutEngine` whose samples are runs, over one in this process that draws the replies."""

    def __init__(self, engine: RolloutEngine, host: AgentHost, *, max_batch: int) -> None:
        """max_batch: replies that are drawn together."""
        self.engine = engine
        self.host = host
        self._max_batch = max_batch
        self._loop = EventLoop()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """`sampling.n_samples_per_prompt` runs per prompt; `max_response_length` limits a reply."""
        generator = EngineGenerator(self.engine, sampling, max_batch=self._max_batch)
        requests = run_requests(prompts, sampling, seed)
        playing = self.host.samples(requests, generator, sampling.max_response_length)
        try:
            with single_error():
                return self._loop.run(playing)
        finally:
            generator.close()

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.engine.update_weights(named_tensors, version=version)

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def close(self) -> None:
        self._loop.run(self.host.close())
        self._loop.close()
        self.engine.close()


class AgentServerSource(GenerateOnCollect):
    """`GroupSource` of runs over servers; plays them in `collect`. Each client plays its share."""

    def __init__(self, servers: ServerSource, host: AgentHost) -> None:
        """host: used on the ranks that are clients."""
        super().__init__()
        self.engine_name = servers.engine_name
        self._servers = servers
        self._host = host

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`; a sample is a run."""
        self._servers.restore_memory()
        share = self._servers.own_share(prompts)
        requests = run_requests([prompts[i] for i in share], sampling, seed)
        playing = _RunsOnServers(self._host, requests, sampling)
        self._servers.on_clients(playing.begin)
        try:
            while self._servers.round(playing.advance):
                pass
        finally:
            playing.cancel()
        return self._servers.checked(playing.samples, share, prompts, sampling)

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`."""
        self._servers.update_weights(weights, version=version)

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`; no run is open between calls."""
        if not keep:
            self._requests.clear()
        self._servers.pause(keep=keep)

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """See `GroupSource.score`."""
        return self._servers.score(sequences)

    def metrics(self) -> dict[str, float]:
        """See `GroupSource.metrics`."""
        return self._servers.metrics()

    def close(self) -> None:
        """End all runs and close the servers' source."""
        with contextlib.suppress(EngineError):
            self._servers.on_clients(lambda client: client.loop.run(self._host.close()))
        self._servers.close()


class _RunsOnServers:
    """A client's runs of one `generate`."""

    def __init__(
        self, host: AgentHost, requests: Sequence[RunRequest], sampling: SamplingParams
    ) -> None:
        self.samples: list[Sample] = []
        self._host = host
        self._requests = requests
        self._sampling = sampling
        self._playing: Future[list[Sample]] | None = None
        self._stream: RequestStream | None = None

    def begin(self, client: RolloutClient) -> None:
        """Start all runs."""
        generator = ServerGenerator(client, self._sampling)
        self._stream = client.stream()
        self._playing = client.loop.spawn(
            self._host.samples(self._requests, generator, self._sampling.max_response_length)
        )

    def advance(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether runs are left."""
        if self._playing is None or self._stream is None:
            return False
        end = time.monotonic() + seconds
        if not self._playing.done():
            self._stream.check_servers()
            with contextlib.suppress(FutureTimeoutError):
                self._playing.exception(max(end - time.monotonic(), 0.0))
        if not self._playing.done():
            return True
        with single_error():
            self.samples = self._playing.result()
        return False

    def cancel(self) -> None:
        """End what still runs."""
        if self._playing is not None:
            self._playing.cancel()


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
