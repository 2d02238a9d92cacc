"""Filters of responses, with counts, and DAPO's penalty for long responses.

A dropped response is not part of the mini-batch: count num_sequences and num_tokens after
filtering, otherwise the loss is rescaled. The loss calls none of these functions; reading a count
may synchronise the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .advantages import as_rewards, group_rewards
from .segments import segment_sums


class Filtered(NamedTuple):
    """`keep` [N] bool; `dropped`, `total`: counts of the filtered units (responses or groups)."""

    keep: Tensor
    dropped: int
    total: int


def _filtered(keep: Tensor) -> Filtered:
    return Filtered(keep, int((~keep).sum()), keep.numel())


def zero_variance_groups(rewards: Tensor, group_ids: Tensor) -> Filtered:
    """Drop responses of groups whose rewards are all equal (DAPO's dynamic sampling,
    arXiv:2503.14476).

    `rewards`, `group_ids` [N] as in `group_advantages`; a group of one is dropped too. Counts
    groups. Apply `finite_rewards` first: rewards that are not finite are not compared correctly.
    """
    values, ids = as_rewards(rewards, group_ids)
    if values.numel() == 0:
        return Filtered(torch.zeros(0, dtype=torch.bool), 0, 0)
    groups = group_rewards(values, ids)
    return Filtered(groups.varied[groups.index], int((~groups.varied).sum()), groups.varied.numel())


def finite_rewards(rewards: Tensor) -> Filtered:
    """Drop responses [N] whose reward is NaN or infinite. Counts responses."""
    return _filtered(torch.isfinite(torch.as_tensor(rewards)))


def finite_log_probs(
    log_probs: Tensor, loss_mask: Tensor, segment_ids: Tensor, num_segments: int
) -> Filtered:
    """Drop sequences with a NaN or infinite log-prob [T] on a trained token; `keep` [num_segments].
    Counts sequences.
    """
    bad = (loss_mask != 0) & ~torch.isfinite(log_probs)
    return _filtered(segment_sums(bad, segment_ids, num_segments) == 0)


def complete_responses(
    finish_reasons: Sequence[str], *, drop: Collection[str] = ("length", "abort")
) -> Filtered:
    """Drop responses [N] that were cut at the length limit or aborted. Counts responses.

    To penalise them instead, keep them and add `overlong_penalty` to their reward.
    """
    return _filtered(
        torch.tensor([reason not in drop for reason in finish_reasons], dtype=torch.bool)
    )


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
