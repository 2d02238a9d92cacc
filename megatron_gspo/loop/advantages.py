"""Advantages are computed here: of each response against its group, or of each turn of an
episode.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_gspo.algorithms import (
    ResponseTerms,
    overlong_penalty,
    response_advantages,
    turn_advantages,
)
from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.columns import ranges
from megatron_gspo.data.sample import FINISH_REASONS
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.gae import token_kl, with_gae
from megatron_gspo.loop.reward_scoring import counts_in_group
from megatron_gspo.loop.turns import tokens_of_turns, turn_rewards


def with_advantages(
    batch: TrainingBatch, algorithm: AlgorithmConfig, *, max_response_length: int
) -> TrainingBatch:
    """The batch with a column ``advantages`` at every response token.

    One value for a response, or with ``turn_discount`` one for each turn; 1 for supervised
    training, 0 where the reward doesn't count. With a value model one for each token, see
    ``with_gae``. A collective of the batch's group where penalties or turns are known to one rank
    each.
    """
    if algorithm.is_supervised:
        return with_response_advantages(batch, np.ones(len(batch)))
    shaped = shaped_rewards(batch, algorithm, max_response_length=max_response_length)
    if algorithm.needs_critic:
        return with_gae(batch, shaped, algorithm)
    if algorithm.kl_reward_coef:
        kl = batch.responses.sums(token_kl(batch, algorithm))
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
    advantages = np.zeros(len(batch), dtype=np.float32)
    advantages[counted] = response_advantages(algorithm, terms).numpy()
    return with_response_advantages(batch, advantages)


def with_response_advantages(batch: TrainingBatch, advantages: np.ndarray) -> TrainingBatch:
    """The batch with a column of the advantages [N] of its responses."""
    of_responses = advantages.astype(np.float32)[batch.responses.positions]
    return batch.with_column("advantages", batch.responses.repeat(of_responses))


def shaped_rewards(
    batch: TrainingBatch, algorithm: AlgorithmConfig, *, max_response_length: int
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
    batch: TrainingBatch, shaped: np.ndarray, algorithm: AlgorithmConfig
) -> TrainingBatch:
    """The batch with the advantage of each turn at its tokens, 0 at observations
    (``algorithm.turn_discount``).

    shaped: [N] rewards of the episodes less penalties (length, KL), which are charged to the last
    turn. Episodes whose reward doesn't count get 0.
    """
    assert algorithm.turn_discount is not None
    table = batch.table
    counts = np.where(counts_in_group(table), table["turns"], 0).astype(np.int64)
    # Every rank has the rewards of the turns of all counted episodes, end to end.
    first_turns = np.cumsum(counts) - counts
    turns = batch.turns.chosen(np.flatnonzero(counts))
    held_turns = ranges(first_turns[turns.positions], turns.lengths)
    rewards = np.zeros(int(counts.sum()))
    rewards[held_turns] = turn_rewards(turns, table, shaped)
    episodes = torch.from_numpy(np.repeat(np.arange(len(batch)), counts))
    advantages = turn_advantages(
        torch.from_numpy(batch.summed(rewards)),
        episodes,
        torch.from_numpy(np.array(table["prompt_index"]))[episodes],
        discount=algorithm.turn_discount,
        std=algorithm.advantage_std,
        baseline=algorithm.advantage_baseline,
    ).numpy()
    column = np.zeros(batch.responses.num_tokens, dtype=np.float32)
    widths = turns["end"] - turns["start"]
    column[tokens_of_turns(batch, turns)] = np.repeat(advantages[held_turns], widths)
    return batch.with_column("advantages", column)
