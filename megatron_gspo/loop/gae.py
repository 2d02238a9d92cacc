"""Advantages from a value model are computed here: of each token, or of each turn of an episode (PPO)."""

from __future__ import annotations

import math
from dataclasses import replace

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

    shaped: [N] rewards less penalties of the whole response. They are earned at the last trained token, rewards of
    turns at the turn's last one; the KL to the reference (``kl_reward_coef``) is charged token by token. The advantages
    of all trained tokens are normalised by their mean and ``advantage_std``. A sample whose reward doesn't count has
    the advantage 0 and its own values as returns. A collective of the batch's group.
    """
    counted = counts_in_group(batch.table)
    batch = batch.map(lambda i, sample: _estimated(sample, float(shaped[i]) if counted[i] else None, algorithm))
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
    """Mean and 1 / standard deviation of the advantages over all ranks; 0 for the latter where they are equal."""
    total, count = batch.sum(sum(float(part.sum(dtype=np.float64)) for part in held), sum(map(len, held)))
    mean = total / max(count, 1)
    (squares,) = batch.sum(sum(float(np.square(part - mean, dtype=np.float64).sum()) for part in held))
    freedom = count - 1 if std == "sample" else count
    deviation = math.sqrt(squares / freedom) if freedom > 0 else 0.0
    return mean, 1 / deviation if deviation > 0 else 0.0


def _estimated(sample: Sample, shaped: float | None, algorithm: AlgorithmConfig) -> Sample:
    """shaped: the sample's reward less penalties; None if it doesn't count."""
    assert sample.values is not None, "the value model's pass comes first"
    advantages, returns = np.zeros(sample.response_length, dtype=np.float32), sample.values.copy()
    tokens = np.flatnonzero(sample.loss_mask)
    if shaped is None or not len(tokens):
        return replace(sample, advantages=advantages, returns=returns)
    rewards = _token_rewards(sample, shaped, int(tokens[-1]), algorithm)
    if algorithm.turn_discount is None:
        advantages[tokens], returns[tokens] = _gae(rewards[tokens], sample.values[tokens], algorithm.gamma, algorithm)
        return replace(sample, advantages=advantages, returns=returns)
    turns = [slice(turn.start, turn.end) for turn in spans(sample)] or [slice(0, sample.response_length)]
    first = np.array([sample.values[turn.start] for turn in turns])
    of_turns = _gae(np.array([rewards[turn].sum() for turn in turns]), first, algorithm.turn_discount, algorithm)
    for turn, advantage, value in zip(turns, *of_turns, strict=True):
        advantages[turn], returns[turn] = advantage, value
    return replace(sample, advantages=advantages, returns=returns)


def _token_rewards(sample: Sample, shaped: float, last: int, algorithm: AlgorithmConfig) -> np.ndarray:
    """[R] float64: the reward that each response token earns. last: the last trained token."""
    rewards, turns = np.zeros(sample.response_length), spans(sample)
    for turn in turns:
        rewards[turn.end - 1] += turn.reward
    rewards[last] += shaped - sample.reward if turns else shaped
    if algorithm.kl_reward_coef:
        rewards -= algorithm.kl_reward_coef * token_kl(sample, algorithm)
    return rewards


def _gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray]:
    found = gae_advantages(torch.from_numpy(rewards), torch.from_numpy(values), gamma=gamma, lam=algorithm.lam)
    return found[0].numpy(), found[1].numpy()


def token_kl(sample: Sample, algorithm: AlgorithmConfig) -> np.ndarray:
    """[R]: the KL to the reference policy, estimated at each trained token; 0 elsewhere."""
    assert sample.old_log_probs is not None and sample.ref_log_probs is not None
    old, reference = torch.from_numpy(sample.old_log_probs), torch.from_numpy(sample.ref_log_probs)
    kl = kl_penalty(old, reference, algorithm.kl_loss_type).numpy()
    return np.where(sample.loss_mask, kl, 0)
