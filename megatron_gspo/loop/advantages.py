"""Advantages are computed here: of each response against its group, or of each turn of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_gspo.algorithms import group_advantages, kl_penalty, overlong_penalty, turn_advantages
from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import counts_in_group


def with_advantages(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, *, max_response_length: int
) -> list[Sample]:
    """The samples with ``advantages`` [R] float32 at every response token.

    One value for a response, or with ``turn_discount`` one for each turn; 1 for supervised training, 0 where the
    reward doesn't count.
    """
    if algorithm.is_supervised:
        return [_with_value(sample, 1.0) for sample in samples]
    shaped = shaped_rewards(samples, algorithm, max_response_length=max_response_length)
    if algorithm.turn_discount is not None:
        return with_turn_advantages(samples, shaped, algorithm)
    counted = torch.tensor([counts_in_group(sample) for sample in samples])
    values = torch.zeros(len(samples))
    values[counted] = group_advantages(
        torch.from_numpy(shaped)[counted],
        torch.tensor([sample.prompt_index for sample in samples])[counted],
        std=algorithm.advantage_std,
        baseline=algorithm.advantage_baseline,
    )
    return [_with_value(sample, value) for sample, value in zip(samples, values.tolist(), strict=True)]


def shaped_rewards(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, *, max_response_length: int
) -> np.ndarray:
    """[N] float64: rewards less the overlong penalty (DAPO) and the KL to the reference, summed over the response."""
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    if algorithm.truncated == "penalize":
        lengths = torch.tensor([sample.response_length for sample in samples])
        rewards += overlong_penalty(
            lengths,
            max_length=max_response_length,
            buffer=algorithm.overlong_buffer_len,
            factor=algorithm.overlong_penalty_factor,
        ).numpy()
    if algorithm.kl_reward_coef:
        for i, sample in enumerate(samples):
            old, reference = torch.from_numpy(sample.old_log_probs), torch.from_numpy(sample.ref_log_probs)
            kl = kl_penalty(old, reference, algorithm.kl_loss_type)
            rewards[i] -= algorithm.kl_reward_coef * float(kl[torch.from_numpy(sample.loss_mask)].sum())
    return rewards


def with_turn_advantages(
    samples: Sequence[Sample], shaped: np.ndarray, algorithm: AlgorithmConfig
) -> list[Sample]:
    """The samples with the advantage of each turn at its tokens, 0 at observations (``algorithm.turn_discount``).

    shaped: [N] rewards of the episodes less penalties (length, KL), which are charged to the last turn. Episodes whose
    reward doesn't count get 0.
    """
    rewards: list[float] = []
    episodes: list[int] = []
    for i, sample in enumerate(samples):
        if counts_in_group(sample):
            own = [span.reward for span in spans(sample)]
            own[-1] += float(shaped[i]) - sample.reward
            rewards += own
            episodes += [i] * len(own)
    of_episodes = torch.tensor(episodes, dtype=torch.int64)
    prompts = torch.tensor([sample.prompt_index for sample in samples], dtype=torch.int64)
    assert algorithm.turn_discount is not None
    values = turn_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        of_episodes,
        prompts[of_episodes],
        discount=algorithm.turn_discount,
        std=algorithm.advantage_std,
        baseline=algorithm.advantage_baseline,
    ).tolist()
    advantages = [np.zeros(sample.response_length, dtype=np.float32) for sample in samples]
    turns = [(i, span) for i in dict.fromkeys(episodes) for span in spans(samples[i])]
    for (i, span), value in zip(turns, values, strict=True):
        advantages[i][span.start : span.end] = value
    return [replace(sample, advantages=own) for sample, own in zip(samples, advantages, strict=True)]


def _with_value(sample: Sample, value: float) -> Sample:
    return replace(sample, advantages=np.full(sample.response_length, value, dtype=np.float32))
