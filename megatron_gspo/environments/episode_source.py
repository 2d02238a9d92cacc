"""Groups of multi-turn episodes on inference servers. In-process engines play them through `EpisodeEngine`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.environments.episodes import (
    Encode,
    Episode,
    EpisodeRules,
    Overlapping,
    Request,
    Steps,
    make_episodes,
)
from megatron_gspo.rollout.group_source import GenerateOnCollect, Weights
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_source import ServerSource

_POLL_SECONDS = 10.0  # longest time between two broadcasts of rank 0


class EpisodeServerSource(GenerateOnCollect):
    """`GroupSource` whose samples are episodes on servers; plays them in `collect`.

    Rank 0 plays. Each episode continues as soon as its own response is finished.
    """

    def __init__(self, servers: ServerSource, steps: Steps, encode: Encode, rules: EpisodeRules) -> None:
        """steps: the environments. encode: text to token ids. rules: limits of an episode."""
        super().__init__()
        self.engine_name = servers.engine_name
        self._servers, self._steps, self._encode, self._rules = servers, steps, encode, rules

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[Sample]:
        """See `GroupSource.generate`; a sample is an episode."""
        episodes = make_episodes(prompts, sampling, self._rules, self._encode, seed=seed)
        player = _Player(episodes, self._steps, sampling, seed)
        self._servers.on_rank_zero(lambda: player.begin(self._servers.client.stream()))
        while not self._servers.poll(player.advance):
            pass
        return self._servers.broadcast(player.samples, prompts, sampling)

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


class _Player:
    """The episodes of one `generate`, played on rank 0. samples: once all are over; None on the other ranks."""

    def __init__(self, episodes: Sequence[Episode], steps: Steps, sampling: SamplingParams, seed: int) -> None:
        self._episodes, self._steps, self._sampling, self._seed = episodes, steps, sampling, seed
        self.samples: list[Sample] | None = None

    def begin(self, stream: RequestStream) -> None:
        """Request every episode's first response."""
        self._stream = stream
        self._playing = Overlapping(self._episodes, self._start, self._steps)

    def advance(self) -> bool:
        """Play for `_POLL_SECONDS`; whether all episodes are over."""
        end = time.monotonic() + _POLL_SECONDS
        while not self._playing.done and (left := end - time.monotonic()) > 0:
            finished = self._stream.take_tickets(1, patience=left)
            self._playing.feed([(ticket, samples[0]) for ticket, samples in finished])
        if self._playing.done:
            self.samples = [episode.sample() for episode in self._episodes]
        return self._playing.done

    def _start(self, request: Request) -> int:
        sampling = replace(self._sampling, n_samples_per_prompt=1, max_response_length=request.limit)
        return self._stream.start([request.prompt], sampling, seed=self._seed)[0]
