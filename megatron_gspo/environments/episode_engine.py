"""An engine whose samples are episodes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.environments.episodes import (
    Decode,
    Encode,
    Environments,
    EpisodeRules,
    make_episodes,
    run_in_rounds,
)
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.wrapped_engine import WrappedEngine


class EpisodeEngine(WrappedEngine):
    """`RolloutEngine` that runs episodes in rounds on another one.

    Their `reward` is set; see `Episode`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environments: Environments,
        encode: Encode,
        rules: EpisodeRules,
        decode: Decode | None = None,
    ) -> None:
        """encode: text to token ids. rules: limits of an episode. decode: token ids of a response
        to its text, for one that is cut off at the limit of its turn; None: it keeps the engine's
        text."""
        super().__init__(engine)
        self.environments = environments
        self.encode = encode
        self.decode = decode
        self.rules = rules

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """`sampling.n_samples_per_prompt` episodes per prompt; `max_response_length` limits all
        responses and observations of an episode together."""
        episodes = make_episodes(
            prompts, sampling, self.rules, self.encode, seed=seed, decode=self.decode
        )
        limit = self.rules.max_length
        run_in_rounds(
            episodes, self.engine, self.environments, sampling, seed=seed, max_length=limit
        )
        return [episode.sample() for episode in episodes]
