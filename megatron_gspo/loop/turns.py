"""The turns of a batch's episodes: their rewards, and their tokens in the batch's columns."""

from __future__ import annotations

import numpy as np

from megatron_gspo.data.columns import Columns, ranges
from megatron_gspo.data.training_batch import TrainingBatch


def turn_rewards(turns: Columns, table: np.ndarray, shaped: np.ndarray) -> np.ndarray:
    """The reward of each turn; the last one is charged the penalties of its episode. shaped: [N]
    rewards of the episodes less penalties."""
    rewards = turns["reward"].copy()
    last_turns = turns.bounds[1:] - 1
    rewards[last_turns] += (shaped - table["reward"])[turns.positions]
    return rewards


def tokens_of_turns(batch: TrainingBatch, turns: Columns) -> np.ndarray:
    """The tokens of turns in the columns of the batch's responses, turn after turn."""
    responses = batch.responses
    episodes = np.searchsorted(responses.positions, turns.positions)
    starts = turns.repeat(responses.bounds[episodes]) + turns["start"]
    return ranges(starts, turns["end"] - turns["start"])
