"""DAPO's filter of groups and its penalty for long responses.

A dropped response is not part of the mini-batch: count num_sequences and num_tokens after
filtering, otherwise the loss is rescaled. The loss calls none of these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_rewards, group_rewards


def zero_variance_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[N] bool: the responses of groups whose rewards are all equal, which DAPO's dynamic sampling
    drops (arXiv:2503.14476).

    `rewards`, `group_ids` [N] as in `group_advantages`; a group of one is such a group. Drop
    rewards that are not finite first: they are not compared correctly.
    """
    values, ids = as_rewards(rewards, group_ids)
    if values.numel() == 0:
        return torch.zeros(0, dtype=torch.bool)
    groups = group_rewards(values, ids)
    return ~groups.varied[groups.index]


def overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the reward (arXiv:2503.14476, eq. 13).

    0 up to max_length - buffer tokens, falling linearly to -factor at max_length, -factor beyond.

    Args:
        lengths: [N] response lengths in tokens.
        max_length: length from which the penalty is full, tokens.
        buffer: number of tokens over which the penalty grows.
        factor: size of the full penalty, in units of reward.

    Returns:
        [N] float32, from -factor to 0.

    Raises:
        ValueError: buffer outside 1..max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer = {buffer!r}: must be 1 to max_length = {max_length} tokens")
    over = torch.as_tensor(lengths).float() - (max_length - buffer)
    # 0 - x, so that a short response gets 0.0 and not -0.0
    return 0 - factor * (over / buffer).clamp(0, 1)
