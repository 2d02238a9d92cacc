"""Advantages are computed here: of each response against its group, or of each turn of an
episode.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megatron_gspo.algorithms import (
    ResponseTerms,
    overlong_penalty,
    response_advantages,
    turn_advantages,
)
from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.gae import token_kl, with_gae
from megatron_gspo.loop.reward_scoring import counts_in_group


def with_advantages(
    batch: SampleBatch, algorithm: AlgorithmConfig, *, max_response_length: int
) -> SampleBatch:
    """The samples with ``advantages`` [R] float32 at every response token.

    One value for a response, or with ``turn_discount`` one for each turn; 1 for supervised
    training, 0 where the reward doesn't count. With a value model one for each token, see
    ``with_gae``. A collective of the batch's group where penalties or turns are known to one rank
    each.
    """
    if algorithm.is_supervised:
        return batch.map(lambda i, sample: _with_value(sample, 1.0))
    shaped = shaped_rewards(batch, algorithm, max_response_length=max_response_length)
    if algorithm.needs_critic:
        return with_gae(batch, shaped, algorithm)
    if algorithm.kl_reward_coef:
        kl = {i: float(token_kl(sample, algorithm).sum()) for i, sample in batch.held.items()}
        shaped -= algorithm.kl_reward_coef * batch.shared(kl)
    if algorithm.turn_discount is not None:
        return with_turn_advantages(batch, shaped, algorithm)
    counted = counts_in_group(batch.table)
    table = batch.table[counted]
    terms = ResponseTerms(
        rewards=torch.from_numpy(shaped[counted]),
        group_ids=torch.from_numpy(table["prompt_index"].astype(np.int64)),
        lengths=torch.from_numpy(table["response_length"].astype(np.int64)),
        truncated=torch.from_numpy(table["finish"] == FINISH_REASONS.index("length")),
    )
    values = torch.zeros(len(batch))
    values[torch.from_numpy(counted)] = response_advantages(algorithm, terms)
    numbers = values.tolist()
    return batch.map(lambda i, sample: _with_value(sample, numbers[i]))


def shaped_rewards(
    batch: SampleBatch, algorithm: AlgorithmConfig, *, max_response_length: int
) -> np.ndarray:
    """[N] float64: rewards less the overlong penalty (DAPO)."""
    rewards = np.array(batch.table["reward"])
    if algorithm.truncated == "penalize":
        rewards += overlong_penalty(
            torch.from_numpy(np.array(batch.table["response_length"])),
            max_length=max_response_length,
            buffer=algorithm.overlong_buffer_len,
            factor=algorithm.overlong_penalty_factor,
        ).numpy()
    return rewards


def with_turn_advantages(
    batch: SampleBatch, shaped: np.ndarray, algorithm: AlgorithmConfig
) -> SampleBatch:
    """The samples with the advantage of each turn at its tokens, 0 at observations
    (``algorithm.turn_discount``).

    shaped: [N] rewards of the episodes less penalties (length, KL), which are charged to the last
    turn. Episodes whose reward doesn't count get 0.
    """
    table = batch.table
    counts = np.where(counts_in_group(table), table["turns"], 0)
    ends = np.cumsum(counts)
    # Of the turns of counted episodes, end to end.
    rewards = np.zeros(int(ends[-1]) if len(ends) else 0)
    for i, sample in batch.held.items():
        if counts[i]:
            own = [span.reward for span in spans(sample)]
            own[-1] += float(shaped[i]) - sample.reward
            rewards[ends[i] - counts[i] : ends[i]] = own
    of_episodes = torch.from_numpy(np.repeat(np.arange(len(batch)), counts))
    assert algorithm.turn_discount is not None
    values = turn_advantages(
        torch.from_numpy(batch.summed(rewards)),
        of_episodes,
        torch.from_numpy(np.array(table["prompt_index"]))[of_episodes],
        discount=algorithm.turn_discount,
        std=algorithm.advantage_std,
        baseline=algorithm.advantage_baseline,
    ).tolist()

    def change(i: int, sample: Sample) -> Sample:
        advantages = np.zeros(sample.response_length, dtype=np.float32)
        if counts[i]:
            for span, value in zip(
                spans(sample), values[ends[i] - counts[i] : ends[i]], strict=True
            ):
                advantages[span.start : span.end] = value
        return replace(sample, advantages=advantages)

    return batch.map(change)


def _with_value(sample: Sample, value: float) -> Sample:
    return replace(sample, advantages=np.full(sample.response_length, value, dtype=np.float32))
