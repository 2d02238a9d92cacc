"""The surrogate of each token at every importance_sampling_level: one function per level, the same
signature.

level(objective, tokens) -> LevelResult; each function sums over the context ranks exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import ImportanceSamplingLevel, Objective

from .metrics import RatioStats
from .ratio import sequence_ratio, token_ratio
from .surrogate import Clip, surrogate
from .token_terms import Tokens


class LevelResult(NamedTuple):
    """What a ratio level returns."""

    surrogate: Tensor
    """[T], to be maximised."""

    lengths: Tensor
    """[num_segments] float64, trained tokens of each sequence over all context ranks."""

    stats: RatioStats | None
    """What `ratio_metrics` reports; None without a ratio."""


def without_ratio(objective: Objective, tokens: Tokens) -> LevelResult:
    """`A_it * log_probs_it`: supervised training."""
    segments = tokens.segments
    (lengths,) = segments.sum_ranks(segments.sums(segments.loss_mask))
    return LevelResult(tokens.log_probs * tokens.advantages, lengths, None)


def token_level(objective: Objective, tokens: Tokens) -> LevelResult:
    """The surrogate of one ratio per token."""
    segments = tokens.segments
    log_ratio = tokens.log_ratio
    ratio, clamped = token_ratio(log_ratio, objective.max_log_ratio)
    value, clip = surrogate(objective, tokens.with_ratio(ratio))
    counts = segments.sums(segments.loss_mask)
    clipped = segments.sums(clip.cut)
    total_clipped, lengths, total = segments.sum_ranks(
        clipped, counts, segments.sums(log_ratio.detach())
    )
    value, off_policy = mask_off_policy(objective, value, tokens, total / lengths.clamp_min(1))
    stats = RatioStats(
        log_ratio=log_ratio,
        ratio=ratio,
        clamped=clamped,
        counts=segments.loss_mask,
        clip=clip,
        clipped=clipped,
        in_clipped_sequences=torch.where(total_clipped > 0, counts, 0),
        off_policy=off_policy,
    )
    return LevelResult(value, lengths, stats)


def sequence_level(objective: Objective, tokens: Tokens) -> LevelResult:
    """The surrogate of one length-normalised ratio per sequence."""
    segments = tokens.segments
    counts = segments.sums(segments.loss_mask)
    sums = segments.sums(tokens.log_ratio.detach())
    total, lengths = segments.sum_ranks(sums, counts)
    mean_log_ratio = total / lengths.clamp_min(1)
    ratio, by_sequence, clamped = sequence_ratio(
        tokens.log_ratio, mean_log_ratio, segments.segment_ids, objective.max_log_ratio
    )
    value, clip = surrogate(objective, tokens.with_ratio(ratio))
    # Equal advantages clip all of a sequence or nothing. Where they differ it counts by its clipped
    # part.
    clipped = segments.sums(clip.cut)
    value, off_policy = mask_off_policy(objective, value, tokens, mean_log_ratio)
    stats = RatioStats(
        log_ratio=tokens.log_ratio,
        ratio=by_sequence,
        clamped=clamped,
        counts=counts,
        clip=clip,
        clipped=clipped,
        in_clipped_sequences=clipped,
        off_policy=off_policy,
    )
    return LevelResult(value, lengths, stats)


def geometric_mean_level(objective: Objective, tokens: Tokens) -> LevelResult:
    """`exp(1/|y_i| sum_t clip(log_ratio_it)) * A_i` (arXiv:2507.20673): one ratio per sequence, of
    token log-ratios that are clipped above epsilon_high where A > 0, and below -epsilon_low where A
    < 0.

    Its gradient goes to the tokens that are not clipped, as that of `sequence_ratio`.
    """
    segments = tokens.segments
    log_ratio = tokens.log_ratio
    low = -objective.number("epsilon_low")
    high = objective.number("epsilon_high")
    with torch.no_grad():
        lower = (tokens.advantages < 0) & (log_ratio < low)
        upper = (tokens.advantages > 0) & (log_ratio > high)
        clip = Clip(lower, lower | upper)
        bounded = torch.where(clip.cut, log_ratio.clamp(low, high), log_ratio)
    counts = segments.sums(segments.loss_mask)
    clipped = segments.sums(clip.cut)
    total, lengths, total_clipped, unclipped = segments.sum_ranks(
        segments.sums(bounded), counts, clipped, segments.sums(log_ratio.detach())
    )
    ratio, by_sequence, clamped = sequence_ratio(
        log_ratio, total / lengths.clamp_min(1), segments.segment_ids, objective.max_log_ratio
    )
    value = torch.where(clip.cut, ratio.detach(), ratio) * tokens.advantages
    mean_log_ratio = unclipped / lengths.clamp_min(1)
    value, off_policy = mask_off_policy(objective, value, tokens, mean_log_ratio)
    stats = RatioStats(
        log_ratio=log_ratio,
        ratio=by_sequence,
        clamped=clamped,
        counts=counts,
        clip=clip,
        clipped=clipped,
        in_clipped_sequences=torch.where(total_clipped > 0, counts, 0),
        off_policy=off_policy,
    )
    return LevelResult(value, lengths, stats)


def mask_off_policy(
    objective: Objective, value: Tensor, tokens: Tokens, mean_log_ratio: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The surrogate's value [T] with 0 where A < 0 and the sequence's mean log-ratio [n] is below
    -off_policy_mask_threshold (DeepSeek-V3.2, arXiv:2512.02556), and this rank's masked tokens by
    sequence [n]. Unchanged without a threshold.
    """
    threshold = objective.off_policy_mask_threshold
    if threshold is None:
        return value, None
    segments = tokens.segments
    beyond = (mean_log_ratio < -threshold).index_select(0, segments.segment_ids)
    masked = (tokens.advantages < 0) & beyond
    return value.masked_fill(masked, 0), segments.sums(masked)


RATIO_LEVELS: dict[ImportanceSamplingLevel, Callable[[Objective, Tokens], LevelResult]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_level,
    "geometric_mean": geometric_mean_level,
    "none": without_ratio,
}
