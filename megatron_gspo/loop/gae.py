"""Advantages from a value model are computed here: of each token, or of each turn of an episode
(PPO).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from megatron_gspo.algorithms import gae_advantages, kl_penalty
from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.columns import ranges
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.reward_scoring import counts_in_group
from megatron_gspo.loop.turns import tokens_of_turns


def with_gae(batch: TrainingBatch, shaped: np.ndarray, algorithm: AlgorithmConfig) -> TrainingBatch:
    """The batch, which has ``values``, with columns ``advantages`` and ``returns``.

    shaped: [N] rewards less penalties of the whole response. They are earned at the last trained
    token, rewards of turns at the turn's last one; the KL to the reference (``kl_reward_coef``) is
    charged token by token. The advantages of all trained tokens are normalised by their mean and
    ``advantage_std``. A response whose reward doesn't count has the advantage 0 and its own values
    as returns. A collective of the batch's group.
    """
    responses = batch.responses
    counted = counts_in_group(batch.table)[responses.positions]
    rewards = token_rewards(batch, shaped, algorithm)
    estimate = _by_token if algorithm.turn_discount is None else _by_turn
    advantages, returns = estimate(batch, rewards, counted, algorithm)
    if algorithm.advantage_std != "none":
        is_counted = responses.repeat(counted)
        trained = advantages[is_counted & responses["loss_mask"]]
        mean, scale = _moments(batch, trained, algorithm.advantage_std)
        normalised = np.where(responses["loss_mask"], (advantages - mean) * scale, 0)
        advantages = np.where(is_counted, normalised, advantages).astype(np.float32)
    return batch.with_column("advantages", advantages).with_column("returns", returns)


def token_rewards(
    batch: TrainingBatch, shaped: np.ndarray, algorithm: AlgorithmConfig
) -> np.ndarray:
    """[T] float64: the reward that each response token earns. shaped: see ``with_gae``."""
    responses = batch.responses
    turns = batch.turns
    rewards = np.zeros(responses.num_tokens)
    widths = turns["end"] - turns["start"]
    last_of_turns = np.cumsum(widths)[widths > 0] - 1
    rewards[tokens_of_turns(batch, turns)[last_of_turns]] += turns["reward"][widths > 0]
    # The rewards of its turns are already those of an episode.
    has_turns = batch.table["turns"] > 0
    at_the_end = shaped - np.where(has_turns, batch.table["reward"], 0)
    trained = np.flatnonzero(responses["loss_mask"])
    samples = responses.sample_ids[trained]
    is_last = np.append(samples[1:] != samples[:-1], True)[: len(samples)]
    rewards[trained[is_last]] += at_the_end[responses.positions[samples[is_last]]]
    if algorithm.kl_reward_coef:
        rewards -= algorithm.kl_reward_coef * token_kl(batch, algorithm)
    return rewards


def token_kl(batch: TrainingBatch, algorithm: AlgorithmConfig) -> np.ndarray:
    """[T]: the KL to the reference policy, estimated at each trained token; 0 elsewhere."""
    responses = batch.responses
    old = torch.from_numpy(responses["old_log_probs"])
    reference = torch.from_numpy(responses["ref_log_probs"])
    kl = kl_penalty(old, reference, algorithm.kl_loss_type).numpy()
    return np.where(responses["loss_mask"], kl, 0)


def _by_token(
    batch: TrainingBatch, rewards: np.ndarray, counted: np.ndarray, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [T] float32, a step of a trajectory being a trained token.

    Args:
        rewards: [T].
        counted: [n] bool, responses whose reward counts.
    """
    responses = batch.responses
    advantages = np.zeros(responses.num_tokens, dtype=np.float32)
    returns = responses["values"].copy()
    is_step = responses["loss_mask"] & responses.repeat(counted)
    lengths = responses.sums(is_step).astype(np.int64)
    step_advantages, step_returns = gae_advantages(
        torch.from_numpy(rewards[is_step]),
        torch.from_numpy(responses["values"][is_step].astype(np.float64)),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        lengths=lengths[lengths > 0].tolist(),
    )
    advantages[is_step] = step_advantages.numpy()
    returns[is_step] = step_returns.numpy()
    return advantages, returns


def _by_turn(
    batch: TrainingBatch, rewards: np.ndarray, counted: np.ndarray, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Like ``_by_token``, with turns as steps; the value of a turn is that of its first token. A
    single-turn response is one turn."""
    assert algorithm.turn_discount is not None
    responses = batch.responses
    advantages = np.zeros(responses.num_tokens, dtype=np.float32)
    returns = responses["values"].copy()
    has_steps = counted & (responses.sums(responses["loss_mask"]) > 0)
    turns = batch.turns
    starts = []
    ends = []
    for index in np.flatnonzero(has_steps).tolist():
        position = int(responses.positions[index])
        start = np.zeros(1, dtype=np.int64)
        end = responses.lengths[index : index + 1]
        if batch.table["turns"][position]:
            start = turns.of_sample("start", position)
            end = turns.of_sample("end", position)
        starts.append(responses.bounds[index] + start)
        ends.append(responses.bounds[index] + end)
    if not starts:
        return advantages, returns
    first = np.concatenate(starts)
    widths = np.concatenate(ends) - first
    tokens = ranges(first, widths)
    step_ids = np.repeat(np.arange(len(first)), widths)
    step_advantages, step_returns = gae_advantages(
        torch.from_numpy(np.bincount(step_ids, rewards[tokens], minlength=len(first))),
        torch.from_numpy(responses["values"][first].astype(np.float64)),
        gamma=algorithm.turn_discount,
        lam=algorithm.lam,
        lengths=[len(start) for start in starts],
    )
    advantages[tokens] = np.repeat(step_advantages.numpy(), widths)
    returns[tokens] = np.repeat(step_returns.numpy(), widths)
    return advantages, returns


def _moments(batch: TrainingBatch, advantages: np.ndarray, std: str) -> tuple[float, float]:
    """Mean and 1 / standard deviation of the advantages over all ranks; 0 for the latter where
    they are equal.
    """
    total, count = batch.sum(float(advantages.sum(dtype=np.float64)), len(advantages))
    mean = total / max(count, 1)
    (squares,) = batch.sum(float(np.square(advantages - mean, dtype=np.float64).sum()))
    freedom = count - 1 if std == "sample" else count
    deviation = math.sqrt(squares / freedom) if freedom > 0 else 0.0
    return mean, 1 / deviation if deviation > 0 else 0.0
