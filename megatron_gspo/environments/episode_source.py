"""Groups of multi-turn episodes on inference servers. In-process engines run them through `EpisodeEngine`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.environments.episodes import (
    ConcurrentEpisodes,
    Encode,
    Environments,
    Episode,
    EpisodeRules,
    Request,
    make_episodes,
)
from megatron_gspo.rollout.group_source import GenerateOnCollect, Weights
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_source import ServerSource

_POLL_SECONDS = 10.0  # longest time between two broadcasts of rank 0


class EpisodeServerSource(GenerateOnCollect):
    """`GroupSource` whose samples are episodes on servers; runs them in `collect`.

    Rank 0 runs them. Each episode continues as soon as its own response is finished.
    """

    def __init__(self, servers: ServerSource, environments: Environments, encode: Encode,
                 rules: EpisodeRules) -> None:  # fmt: skip
        """encode: text to token ids. rules: limits of an episode."""
        super().__init__()
        self.engine_name = servers.engine_name
        self._servers, self._environments, self._encode, self._rules = servers, environments, encode, rules

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> SampleBatch:
        """See `GroupSource.generate`; a sample is an episode."""
        self._servers.restore_memory()
        episodes = make_episodes(prompts, sampling, self._rules, self._encode, seed=seed)
        run = _EpisodeRun(episodes, self._environments, sampling, seed)
        self._servers.on_rank_zero(lambda: run.begin(self._servers.client.stream()))
        while not self._servers.poll(run.advance):
            pass
        return self._servers.announce(run.samples, prompts, sampling)

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`."""
        self._servers.update_weights(weights, version=version)

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`; no request is in flight between calls."""
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
        """Close the servers' source."""
        self._servers.close()


class _EpisodeRun:
    """The episodes of one `generate`, on rank 0. samples: set when all are over; None on the other ranks."""

    def __init__(self, episodes: Sequence[Episode], environments: Environments, sampling: SamplingParams,
                 seed: int) -> None:  # fmt: skip
        self._episodes, self._environments, self._sampling, self._seed = episodes, environments, sampling, seed
        self.samples: list[Sample] | None = None

    def begin(self, stream: RequestStream) -> None:
        """Request every episode's first response."""
        self._stream = stream
        self._running = ConcurrentEpisodes(self._episodes, self._start, self._environments)

    def advance(self) -> bool:
        """Run for at most `_POLL_SECONDS`; whether all episodes are over."""
        end = time.monotonic() + _POLL_SECONDS
        while not self._running.done and (left := end - time.monotonic()) > 0:
            finished = self._stream.take_tickets(1, patience=left)
            self._running.add_responses([(ticket, samples[0]) for ticket, samples in finished])
        if self._running.done:
            self.samples = [episode.sample() for episode in self._episodes]
        return self._running.done

    def _start(self, request: Request) -> int:
        sampling = replace(self._sampling, n_samples_per_prompt=1, max_response_length=request.limit)
        return self._stream.start([request.prompt], sampling, seed=self._seed)[0]
