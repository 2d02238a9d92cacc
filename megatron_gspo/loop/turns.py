"""Multi-turn episodes in the loop: generated, scored, and what each turn was worth."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import turn_advantages
from megatron_gspo.config import AlgorithmConfig, Config, SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import spans, with_spans
from megatron_gspo.environments.episode_engine import EpisodeEngine
from megatron_gspo.environments.episodes import EpisodeRules, Overlapping, Request, make_episodes
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.servers import is_central, on_first, sync_weights
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.sample_exchange import broadcast_samples, generate_spread
from megatron_gspo.rollout.server_engine.request_stream import WeightsNeeded

_PATIENCE = 10.0  # seconds between two words of the first rank


def episode_rules(config: Config) -> EpisodeRules:
    """The limits of an episode."""
    rollout = config.rollout
    longest = config.data.max_prompt_length + rollout.max_response_length
    return EpisodeRules(rollout.max_turns, longest, rollout.max_turn_length)


def generate_episodes(
    run: Run, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> list[Sample]:
    """Episodes on ``prompts``, prompt-major, on every rank: each plays a share, or the servers' client all."""

    def encode(text: str) -> list[int]:
        return run.tokenizer.encode(text, add_special_tokens=False)

    rules, vocabulary = episode_rules(run.config), run.policy.shape.vocab_size
    if not is_central(engine):
        playing = EpisodeEngine(engine, run.environments, encode, rules)
        return generate_spread(playing, prompts, sampling, seed=seed, group=dist.group.WORLD,
                               device=compute_device(), vocab_size=vocabulary)  # fmt: skip
    episodes = make_episodes(prompts, sampling, rules, encode, seed=seed)
    _play_on_servers(run, episodes, sampling, seed)

    def finish() -> None:
        done[:] = [episode.sample() for episode in episodes]
        check_samples(done, prompts, sampling, vocab_size=vocabulary)

    done: list[Sample] = []
    on_first(finish)
    return broadcast_samples(done if dist.get_rank() == 0 else None, dist.group.WORLD, compute_device())


def _play_on_servers(run: Run, episodes: Sequence[Any], sampling: SamplingParams, seed: int) -> None:
    """The first rank plays; every episode goes on as soon as its own response is there. A collective."""
    held: dict[str, Any] = {}

    def begin() -> None:
        stream = run.engine.stream()

        def start(request: Request) -> int:
            asked = replace(sampling, n_samples_per_prompt=1, max_response_length=request.limit)
            return stream.start([request.prompt], asked, seed=seed)[0]

        held.update(stream=stream, playing=Overlapping(episodes, start, run.environments))

    def some() -> str:
        end = time.monotonic() + _PATIENCE
        try:
            while not held["playing"].done and (left := end - time.monotonic()) > 0:
                finished = held["stream"].take_tickets(1, patience=left)
                held["playing"].feed([(ticket, samples[0]) for ticket, samples in finished])
        except WeightsNeeded:
            return "weights"
        return "done" if held["playing"].done else "more"

    on_first(begin)
    while (word := on_first(some)) != "done":
        if word == "weights":
            sync_weights(run, run.weights_version)


def score_episodes(samples: Sequence[Sample], failure_reward: float | None) -> Counter[str]:
    """Failures of environments by kind. ``failure_reward`` (None: NaN) is what such an episode is worth, as where a
    verifier fails; it is the last turn's, and the others are worth nothing."""
    failures: Counter[str] = Counter()
    for sample in samples:
        reason = sample.metadata.get(FAILURE)
        if reason is None:
            continue
        failures[reason.partition(":")[0]] += 1
        if failure_reward is not None:
            worthless = [replace(span, reward=0.0) for span in spans(sample)]
            turns = [*worthless[:-1], replace(worthless[-1], reward=failure_reward)]
            sample.metadata = sample.metadata | with_spans(turns)
            sample.reward = failure_reward
    return failures


def advantages_by_turn(
    algorithm: AlgorithmConfig, samples: Sequence[Sample], shaped: np.ndarray, compared: Sequence[bool]
) -> None:
    """``Sample.advantages`` with ``algorithm.turn_discount``: of each turn on its tokens, 0 on observations.

    shaped: [N] rewards of the episodes less penalties (length, KL), which are charged to the last turn. compared:
    whether a sample's reward counts; the others get 0.
    """
    rewards: list[float] = []
    episodes: list[int] = []
    for i, sample in enumerate(samples):
        sample.advantages = np.zeros(sample.response_length, dtype=np.float32)
        if compared[i]:
            mine = [span.reward for span in spans(sample)]
            mine[-1] += float(shaped[i]) - sample.reward
            rewards += mine
            episodes += [i] * len(mine)
    of_episodes = torch.tensor(episodes, dtype=torch.int64)
    prompts = torch.tensor([sample.prompt_index for sample in samples], dtype=torch.int64)
    values = turn_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        of_episodes,
        prompts[of_episodes],
        discount=algorithm.turn_discount,
        std=algorithm.advantage_std,
        baseline=algorithm.advantage_baseline,
    ).tolist()
    places = [(samples[i], span) for i in dict.fromkeys(episodes) for span in spans(samples[i])]
    for (sample, span), value in zip(places, values, strict=True):
        sample.advantages[span.start : span.end] = value


def turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """``turns/*`` of episodes; nothing where there are none."""
    counts = [len(spans(sample)) for sample in samples]
    if not any(counts):
        return {}
    observed = [sample.response_length - sum(s.end - s.start for s in spans(sample)) for sample in samples]
    return {
        "turns/mean": float(np.mean(counts)),
        "turns/max": float(np.max(counts)),
        "turns/observation_tokens": float(np.mean(observed)),
    }
