"""Advantages from a value model are computed here: of each token, or of each turn of an episode
(PPO).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_gspo.algorithms import gae_advantages, kl_penalty
from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import counts_in_group


def with_gae(batch: SampleBatch, shaped: np.ndarray, algorithm: AlgorithmConfig) -> SampleBatch:
    """The samples, which have ``values``, with ``advantages`` and ``returns`` [R] float32.

    shaped: [N] rewards less penalties of the whole response. They are earned at the last trained
    token, rewards of turns at the turn's last one; the KL to the reference (``kl_reward_coef``) is
    charged token by token. The advantages of all trained tokens are normalised by their mean and
    ``advantage_std``. A sample whose reward doesn't count has the advantage 0 and its own values as
    returns. A collective of the batch's group.
    """
    counted = counts_in_group(batch.table)
    estimated: dict[int, Sample] = {}
    for piece in batch.pieces():
        steps = {
            i: _steps(sample, float(shaped[i]), algorithm)
            for i, sample in piece.held.items()
            if counted[i] and sample.loss_mask.any()
        }
        estimated |= _estimated(piece.held, steps, algorithm)
    batch = batch.map(lambda i, sample: estimated[i])
    if algorithm.advantage_std == "none":
        return batch
    kept = [_advantages(sample)[sample.loss_mask] for i, sample in batch.held.items() if counted[i]]
    mean, scale = _moments(batch, kept, algorithm.advantage_std)

    def normalised(i: int, sample: Sample) -> Sample:
        if not counted[i]:
            return sample
        values = np.where(sample.loss_mask, (_advantages(sample) - mean) * scale, 0)
        return replace(sample, advantages=values.astype(np.float32))

    return batch.map(normalised)


def _advantages(sample: Sample) -> np.ndarray:
    assert sample.advantages is not None
    return sample.advantages


def _moments(batch: SampleBatch, held: list[np.ndarray], std: str) -> tuple[float, float]:
    """Mean and 1 / standard deviation of the advantages over all ranks; 0 for the latter where
    they are equal.
    """
    total, count = batch.sum(
        sum(float(part.sum(dtype=np.float64)) for part in held), sum(map(len, held))
    )
    mean = total / max(count, 1)
    (squares,) = batch.sum(
        sum(float(np.square(part - mean, dtype=np.float64).sum()) for part in held)
    )
    freedom = count - 1 if std == "sample" else count
    deviation = math.sqrt(squares / freedom) if freedom > 0 else 0.0
    return mean, 1 / deviation if deviation > 0 else 0.0


@dataclass(frozen=True)
class _Steps:
    """A response's trajectory of n steps, tokens or turns. tokens: [m], positions in the response,
    those of each step together. widths: [n], how many each has. rewards, values: [n]."""

    tokens: np.ndarray
    widths: np.ndarray
    rewards: np.ndarray
    values: np.ndarray


def _steps(sample: Sample, shaped: float, algorithm: AlgorithmConfig) -> _Steps:
    """shaped: the sample's reward less penalties."""
    assert sample.values is not None, "the value model's pass comes first"
    trained = np.flatnonzero(sample.loss_mask)
    rewards = _token_rewards(sample, shaped, int(trained[-1]), algorithm)
    if algorithm.turn_discount is None:
        return _Steps(
            trained, np.ones(len(trained), dtype=np.int64), rewards[trained], sample.values[trained]
        )
    turns = [(turn.start, turn.end) for turn in spans(sample)] or [(0, sample.response_length)]
    return _Steps(
        np.concatenate([np.arange(start, end) for start, end in turns]),
        np.array([end - start for start, end in turns]),
        np.array([rewards[start:end].sum() for start, end in turns]),
        np.array([sample.values[start] for start, _ in turns]),
    )


def _estimated(
    samples: Mapping[int, Sample], steps: Mapping[int, _Steps], algorithm: AlgorithmConfig
) -> dict[int, Sample]:
    """The samples with advantages and returns, by position; those of samples without steps are
    0 and the values.
    """
    lengths = [len(one.widths) for one in steps.values()]
    none = [np.zeros(0)]
    advantages, returns = gae_advantages(
        torch.from_numpy(np.concatenate([one.rewards for one in steps.values()] or none)),
        torch.from_numpy(np.concatenate([one.values for one in steps.values()] or none)),
        gamma=algorithm.gamma if algorithm.turn_discount is None else algorithm.turn_discount,
        lam=algorithm.lam,
        lengths=lengths,
    )
    ends = np.cumsum(lengths)[:-1]
    of_steps = dict(
        zip(
            steps,
            zip(np.split(advantages.numpy(), ends), np.split(returns.numpy(), ends), strict=True),
            strict=False,
        )
    )
    estimated = {}
    for i, sample in samples.items():
        assert sample.values is not None, "the value model's pass comes first"
        advantage = np.zeros(sample.response_length, dtype=np.float32)
        value = sample.values.copy()
        if i in steps:
            tokens = steps[i].tokens
            widths = steps[i].widths
            advantage[tokens], value[tokens] = (np.repeat(values, widths) for values in of_steps[i])
        estimated[i] = replace(sample, advantages=advantage, returns=value)
    return estimated


def _token_rewards(
    sample: Sample, shaped: float, last: int, algorithm: AlgorithmConfig
) -> np.ndarray:
    """[R] float64: the reward that each response token earns. last: the last trained token."""
    rewards = np.zeros(sample.response_length)
    turns = spans(sample)
    for turn in turns:
        rewards[turn.end - 1] += turn.reward
    rewards[last] += shaped - sample.reward if turns else shaped
    if algorithm.kl_reward_coef:
        rewards -= algorithm.kl_reward_coef * token_kl(sample, algorithm)
    return rewards


def token_kl(sample: Sample, algorithm: AlgorithmConfig) -> np.ndarray:
    """[R]: the KL to the reference policy, estimated at each trained token; 0 elsewhere."""
    assert sample.old_log_probs is not None and sample.ref_log_probs is not None
    old = torch.from_numpy(sample.old_log_probs)
    reference = torch.from_numpy(sample.ref_log_probs)
    kl = kl_penalty(old, reference, algorithm.kl_loss_type).numpy()
    return np.where(sample.loss_mask, kl, 0)
