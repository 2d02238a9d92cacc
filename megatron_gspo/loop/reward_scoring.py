"""Rewards are computed here: by the verifier, each rank a share, or by the environments of the
episodes.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import zero_variance_groups
from megatron_gspo.data.prompt_mix import of_each_source
from megatron_gspo.data.sample import FINISH_REASONS, Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.turn_spans import spans, with_spans
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.loop.timers import Timers
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import exchange_bytes
from megatron_gspo.parallel.rank_zero import first_failure
from megatron_gspo.rewards.scorer import FAILURE, FAILURES
from megatron_gspo.rewards.source_scorers import SourceScorers
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_ABORTED = FINISH_REASONS.index("abort")


class Rewards(Protocol):
    """Scores samples. name: of the verifier or environment, for messages. description: what it says
    of itself at the start of a run, None for nothing."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str | None: ...

    def __call__(
        self, batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[SampleBatch, Counter[str]]:
        """The samples with their rewards, known to every rank, and how many got each of
        ``FAILURES`` or ``VERDICTS``.

        prompts: of the data, by index; a rank reads those of the responses that it scores. The
        reward of a failure is ``data.verifier_failure_reward`` or NaN; its reason is in the
        sample's metadata.
        """
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


@dataclass(frozen=True)
class VerifierRewards:
    """Rewards of a verifier. Each rank scores the responses that it holds; texts move from ranks
    with more than their share to ranks with less, or all to rank 0 for a verifier that needs the
    whole batch."""

    scorer: SourceScorers
    name: str

    @property
    def description(self) -> str | None:
        """See `Rewards`."""
        return self.scorer.description

    def __call__(
        self, batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[SampleBatch, Counter[str]]:
        """See `Rewards`."""
        with timers("verify"):
            holders = batch.table["holder"]
            group = batch.group
            scorers = balanced_scorers(holders, group_size(group))
            if self.scorer.needs_whole_batch:
                scorers = np.zeros_like(holders)
                if group_rank(group) != 0:
                    self.scorer.release()
            texts = _sent(
                {i: sample.text for i, sample in batch.held.items()}, holders, scorers, group
            )
            prompt_of_text = batch.table["prompt_index"][list(texts)].tolist()
            # Each once, since a file of prompts reads one at every access.
            asked = {index: prompts[index] for index in sorted(set(prompt_of_text))}
            scores = self.scorer.score_texts(
                [
                    (text, asked[index])
                    for text, index in zip(texts.values(), prompt_of_text, strict=True)
                ]
            )
            rewards = batch.shared(dict(zip(texts, scores.rewards.tolist(), strict=True)))
            local_counts = scores.counts | scores.verdicts
            totals = map(int, batch.sum(*local_counts.values()))
            counts = Counter(dict(zip(local_counts, totals, strict=True)))
            scored = batch.with_rewards(rewards)
            if any(counts[name] for name in FAILURES):
                reasons = {
                    i: failure for i, failure in zip(texts, scores.failures, strict=True) if failure
                }
                scored = _with_reasons(scored, reasons, scorers)
        return scored, counts

    def close(self) -> None:
        """End the worker processes."""
        self.scorer.close()


@dataclass(frozen=True)
class EpisodeRewards:
    """Rewards that environments gave while episodes were played, or that runs of agents got;
    counts failures.
    """

    environments: EnvironmentPool | None
    """The environments of the episodes; None for agents."""

    name: str
    failure_reward: float | None
    description: str | None = None

    def __call__(
        self, batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers
    ) -> tuple[SampleBatch, Counter[str]]:
        """See `Rewards`."""
        episodes, failures = score_episodes(batch.samples, self.failure_reward)
        held = dict(zip(batch.held, episodes, strict=True))
        rewards = batch.shared({i: sample.reward for i, sample in held.items()})
        scored = batch.with_samples(held).with_rewards(rewards)
        totals = map(int, batch.sum(*(failures[name] for name in FAILURES)))
        counts = {name: total for name, total in zip(FAILURES, totals, strict=True) if total}
        return scored, Counter(counts)

    def close(self) -> None:
        """End the worker processes."""
        if self.environments is not None:
            self.environments.close()


def score_episodes(
    samples: Sequence[Sample], failure_reward: float | None
) -> tuple[list[Sample], Counter[str]]:
    """The episodes, and failures of environments by kind.

    failure_reward: reward of an episode whose environment failed, given to its last turn; the other
    turns then have a reward of 0. None: such an episode has no reward (NaN), and neither has a run
    without a turn.
    """
    failures: Counter[str] = Counter()
    scored = []
    for sample in samples:
        reason = sample.metadata.get(FAILURE)
        if reason is not None:
            failures[reason.partition(":")[0]] += 1
            turns = [replace(span, reward=0.0) for span in spans(sample)]
            if failure_reward is not None and turns:
                turns[-1] = replace(turns[-1], reward=failure_reward)
                sample = replace(
                    sample, metadata=sample.metadata | with_spans(turns), reward=failure_reward
                )
        scored.append(sample)
    return scored, failures


def balanced_scorers(holders: np.ndarray, size: int) -> np.ndarray:
    """[N] the rank that scores each response, at most ceil(N / size) of each of `size` ranks. It is
    its holder, or for what a holder has beyond that the next ranks with room, which are often on
    its node.

    holders: [N] ranks.
    """
    share = -(-len(holders) // size)
    scorers = holders.copy()
    ends = np.cumsum(np.bincount(holders, minlength=size))
    held = np.split(np.argsort(holders, kind="stable"), ends[:-1])
    room = [max(share - len(positions), 0) for positions in held]
    waiting: deque[int] = deque()
    for turn in range(2 * size):  # twice around: what the last ranks have may go to the first
        rank = turn % size
        if turn < size:
            waiting.extend(held[rank][share:].tolist())
        while room[rank] and waiting:
            scorers[waiting.popleft()] = rank
            room[rank] -= 1
    return scorers


def _sent(
    values: Mapping[int, str],
    source: np.ndarray,
    target: np.ndarray,
    group: dist.ProcessGroup | None,
) -> dict[int, str]:
    """Texts by position: each from rank ``source[position]``, if it has one, to
    ``target[position]``, ascending. A collective."""
    kept = {i: text for i, text in values.items() if target[i] == group_rank(group)}
    texts_for_rank: dict[int, dict[int, str]] = {}
    for i, text in values.items():
        if i not in kept:
            texts_for_rank.setdefault(int(target[i]), {})[i] = text
    moving = source != target
    links = np.stack([source[moving], target[moving]], axis=1)
    payload = {rank: json.dumps(texts).encode() for rank, texts in texts_for_rank.items()}
    for message in exchange_bytes(payload, links, group).values():
        kept |= {int(i): text for i, text in json.loads(message.tobytes() or b"{}").items()}
    return dict(sorted(kept.items()))


def _with_reasons(
    batch: SampleBatch, local_reasons: Mapping[int, str], scorers: np.ndarray
) -> SampleBatch:
    """The samples with the reasons of failures in their metadata.

    local_reasons: of what this rank scored, by position. A collective.
    """
    reasons = _sent(local_reasons, scorers, batch.table["holder"], batch.group)
    return batch.with_samples(
        {
            i: replace(batch.held[i], metadata={**batch.held[i].metadata, FAILURE: reason})
            for i, reason in reasons.items()
        }
    )


def failed_on_all(name: str, responses: int, first_reason: str) -> VerifierError:
    """The error of whoever scores, with the reason of the first response."""
    return VerifierError(
        f"{name} failed on all {responses} responses of a batch (the first: {first_reason}); fix it"
    )


def require_scores(batch: SampleBatch, name: str, prompts: Sequence[Prompt]) -> None:
    """Raise ``VerifierError`` if no response has a score: then the verifier is broken, not the
    responses. If those to prompts of one source have none, a line says so.

    prompts: of the data, by index. A collective of the batch's group.
    """
    failed = np.isnan(batch.table["reward"])
    if failed.all():
        reason = _first_reason(batch, failed)
        raise failed_on_all(name, len(batch), reason)
    for source, is_of_source in of_each_source(prompts, batch.table["prompt_index"]).items():
        if is_of_source.any() and failed[is_of_source].all():
            reason = _first_reason(batch, is_of_source)
            if group_rank(batch.group) == 0:
                logger.warning(
                    f"all {int(is_of_source.sum())} responses of a batch to prompts of"
                    f" {source} have no reward (the first: {reason})"
                )


def _first_reason(batch: SampleBatch, chosen: np.ndarray) -> str:
    """Why the first of the chosen responses [N] bool that failed did. A collective."""
    local_reason = next(
        (
            sample.metadata[FAILURE]
            for i, sample in batch.held.items()
            if chosen[i] and FAILURE in sample.metadata
        ),
        "",
    )
    failure = first_failure(local_reason, batch.group)
    return "no reason given" if failure is None else failure[1]


def counts_in_group(table: np.ndarray) -> np.ndarray:
    """[N] bool: whether a response's reward counts in its group's mean and standard deviation;
    see ``loss_masking``.
    """
    return np.isfinite(table["reward"]) & (table["finish"] != _ABORTED)


def in_varied_group(table: np.ndarray) -> np.ndarray:
    """[N] bool: whether the rewards of a sample's group that count differ."""
    counted = table[counts_in_group(table)]
    groups = np.array(counted["prompt_index"])
    is_equal = zero_variance_groups(
        torch.from_numpy(np.array(counted["reward"])), torch.from_numpy(groups)
    ).numpy()
    return np.isin(table["prompt_index"], groups[~is_equal])
