"""Rewards are computed here: by the verifier, each rank a share, or by the environments that played the episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_gspo.algorithms import zero_variance_groups
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import spans, with_spans
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer
from megatron_gspo.rewards.verifiers import VerifierError


class Rewards(Protocol):
    """Scores samples. name: of the verifier or environment, for messages."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[list[Sample], Counter[str]]:
        """The samples with their rewards, the same on every rank, and failures by kind.

        The reward of a failure is ``data.verifier_failure_reward`` or NaN; its reason is in the metadata.
        """
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


@dataclass(frozen=True)
class VerifierRewards:
    """Rewards of a verifier. Each rank scores every N-th sample of N ranks; one all-reduce distributes the rewards."""

    scorer: RewardScorer
    name: str

    def __call__(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[list[Sample], Counter[str]]:
        """See `Rewards`."""
        with timers("verify"):
            rank, size = dist.get_rank(), dist.get_world_size()
            scores = self.scorer.score(samples[rank::size], prompts)
            rewards = torch.zeros(len(samples), dtype=torch.float64)
            rewards[rank::size] = torch.from_numpy(scores.rewards).double()
            names = sorted(scores.counts)
            counts = torch.tensor([float(scores.counts[name]) for name in names], dtype=torch.float64)
            both = torch.cat([rewards, counts]).to(compute_device())
            dist.all_reduce(both)
            values = both.tolist()
            scored = [replace(s, reward=reward) for s, reward in zip(samples, values[: len(samples)], strict=True)]
            failures = Counter(dict(zip(names, map(int, values[len(samples) :]), strict=True)))
            if failures.total():
                scored = _with_reasons(scored, scores.statuses, scores.messages)
        return scored, failures

    def close(self) -> None:
        """End the worker processes."""
        self.scorer.close()


@dataclass(frozen=True)
class EpisodeRewards:
    """Rewards that the environments gave while the episodes were played; counts the environments' failures."""

    environments: EnvironmentPool
    name: str
    failure_reward: float | None

    def __call__(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[list[Sample], Counter[str]]:
        """See `Rewards`."""
        return score_episodes(samples, self.failure_reward)

    def close(self) -> None:
        """End the worker processes."""
        self.environments.close()


def score_episodes(samples: Sequence[Sample], failure_reward: float | None) -> tuple[list[Sample], Counter[str]]:
    """The episodes, and failures of environments by kind.

    failure_reward: reward of an episode whose environment failed, given to its last turn; the other turns then have a
    reward of 0. None: such an episode has no reward (NaN).
    """
    failures: Counter[str] = Counter()
    scored = []
    for sample in samples:
        reason = sample.metadata.get(FAILURE)
        if reason is not None:
            failures[reason.partition(":")[0]] += 1
            if failure_reward is not None:
                turns = [replace(span, reward=0.0) for span in spans(sample)]
                turns[-1] = replace(turns[-1], reward=failure_reward)
                sample = replace(sample, metadata=sample.metadata | with_spans(turns), reward=failure_reward)
        scored.append(sample)
    return scored, failures


def _with_reasons(samples: Sequence[Sample], statuses: Sequence[str], messages: Sequence[str]) -> list[Sample]:
    """The samples with the reasons of all ranks' failures in their metadata; a collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {
        rank + i * size: f"{status}: {message}"
        for i, (status, message) in enumerate(zip(statuses, messages, strict=True))
        if status != "ok"
    }
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    reasons = {position: reason for found in gathered for position, reason in found.items()}
    return [
        replace(sample, metadata={**sample.metadata, FAILURE: reasons[i]}) if i in reasons else sample
        for i, sample in enumerate(samples)
    ]


def require_scores(samples: Sequence[Sample], name: str) -> None:
    """Raise ``VerifierError`` if no response has a score: then the verifier is broken, not the responses."""
    if all(math.isnan(sample.reward) for sample in samples):
        reason = next((sample.metadata[FAILURE] for sample in samples if FAILURE in sample.metadata), "no reason given")
        raise VerifierError(f"{name} failed on all {len(samples)} responses of a batch (the first: {reason}); fix it")


def counts_in_group(sample: Sample) -> bool:
    """Whether a response's reward counts in its group's mean and standard deviation; see ``loss_masking``."""
    return math.isfinite(sample.reward) and sample.finish_reason != "abort"


def in_varied_group(samples: Sequence[Sample]) -> list[bool]:
    """For each sample, whether the rewards of its group that count differ."""
    counted = [sample for sample in samples if counts_in_group(sample)]
    rewards = torch.tensor([sample.reward for sample in counted], dtype=torch.float64)
    groups = torch.tensor([sample.prompt_index for sample in counted], dtype=torch.int64)
    keep = zero_variance_groups(rewards, groups).keep.tolist()
    varied = {sample.prompt_index for sample, kept in zip(counted, keep, strict=True) if kept}
    return [sample.prompt_index in varied for sample in samples]
