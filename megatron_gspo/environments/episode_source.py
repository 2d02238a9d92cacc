"""Groups of multi-turn episodes on inference servers.

In-process engines run them through `EpisodeEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
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


class EpisodeServerSource(GenerateOnCollect):
    """`GroupSource` whose samples are episodes on servers; runs them in `collect`.

    Each client runs its share. An episode continues as soon as its own response is finished.
    """

    def __init__(
        self, servers: ServerSource, environments: Environments, encode: Encode, rules: EpisodeRules
    ) -> None:
        """encode: text to token ids. rules: limits of an episode."""
        super().__init__()
        self.engine_name = servers.engine_name
        self._servers = servers
        self._environments = environments
        self._encode = encode
        self._rules = rules

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`; a sample is an episode."""
        self._servers.restore_memory()
        share = self._servers.own_share(prompts)
        requested = [prompts[i] for i in share]
        episodes = make_episodes(requested, sampling, self._rules, self._encode, seed=seed)
        run = _EpisodeRun(episodes, self._environments, sampling, seed)
        self._servers.on_clients(lambda client: run.begin(client.stream()))
        while self._servers.round(run.advance):
            pass
        return self._servers.checked(
            [episode.sample() for episode in episodes], share, prompts, sampling
        )

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
    """A client's episodes of one `generate`."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        environments: Environments,
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        self._episodes = episodes
        self._environments = environments
        self._sampling = sampling
        self._seed = seed

    def begin(self, stream: RequestStream) -> None:
        """Request every episode's first response."""
        self._stream = stream
        self._running = ConcurrentEpisodes(self._episodes, self._start, self._environments)

    def advance(self, seconds: float) -> bool:
        """Run for at most `seconds`, but for steps of environments; whether episodes are left."""
        end = time.monotonic() + seconds
        while not self._running.done and (left := end - time.monotonic()) > 0:
            finished = self._stream.take_tickets(1, patience=left)
            self._running.add_responses([(ticket, samples[0]) for ticket, samples in finished])
        return not self._running.done

    def _start(self, request: Request) -> int:
        sampling = replace(
            self._sampling, n_samples_per_prompt=1, max_response_length=request.limit
        )
        return self._stream.start([request.prompt], sampling, seed=self._seed)[0]
