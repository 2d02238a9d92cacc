"""An engine whose samples are episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.environments.episodes import Encode, EpisodeRules, Steps, make_episodes, play_in_rounds
from megatron_gspo.rollout.engine_protocol import RolloutEngine


class EpisodeEngine:
    """`RolloutEngine` that plays episodes in rounds over another one. Their `reward` is filled in; see `Episode`."""

    def __init__(self, engine: RolloutEngine, steps: Steps, encode: Encode, rules: EpisodeRules) -> None:
        self.engine, self.steps, self.encode, self.rules = engine, steps, encode, rules

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[Sample]:
        """`sampling.n_samples_per_prompt` episodes per prompt; `max_response_length` limits all responses and
        observations of an episode together."""
        episodes = make_episodes(prompts, sampling, self.rules, self.encode, seed=seed)
        play_in_rounds(episodes, self.engine, self.steps, sampling, seed=seed, max_length=self.rules.max_length)
        return [episode.sample() for episode in episodes]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.engine.update_weights(named_tensors, version=version)

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def close(self) -> None:
        self.engine.close()
