"""The surrogate of each token at every importance_sampling_level: one function per level, the same
signature.

level(objective, log_ratio, advantages, segments, *scores) -> (surrogate, lengths, stats)

log_ratio: [T] log_probs - old_log_probs, or log_probs without a ratio; 0 at untrained positions. It
    has the gradient of log_probs.
advantages: [T], 0 at untrained positions.
segments: the sequences; each function sums over the context ranks exactly once.
scores: log_probs [T] with gradient where `objective.weighs_log_probs`, and rollout_log_probs [T]
    where `objective.needs_rollout_log_probs`; 0 at untrained positions.
surrogate: [T], to be maximised.
lengths: [num_segments] float64, trained tokens of each sequence over all context ranks.
stats: what `ratio_metrics` reports; None without a ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .metrics import RatioStats
from .objective import ImportanceSamplingLevel, Objective
from .ratio import sequence_ratio, token_ratio
from .segments import Segments
from .surrogate import SURROGATES, Clip

Surrogate: TypeAlias = tuple[Tensor, Tensor, RatioStats | None]


def without_ratio(
    objective: Objective, log_probs: Tensor, advantages: Tensor, segments: Segments, *_: Tensor
) -> Surrogate:
    """`A_it * log_probs_it`: supervised training."""
    (lengths,) = segments.sum_ranks(segments.sums(segments.loss_mask))
    return log_probs * advantages, lengths, None


def token_level(
    objective: Objective, log_ratio: Tensor, advantages: Tensor, segments: Segments, *scores: Tensor
) -> Surrogate:
    """The surrogate of one ratio per token."""
    ratio, clamped = token_ratio(log_ratio, objective.max_log_ratio)
    surrogate, clip = SURROGATES[objective.surrogate](
        objective, ratio, advantages, log_ratio, *scores
    )
    counts, clipped = segments.sums(segments.loss_mask), segments.sums(clip.cut)
    masks = objective.off_policy_mask_threshold is not None
    total_clipped, lengths, *total = segments.sum_ranks(
        clipped, counts, *([segments.sums(log_ratio.detach())] if masks else [])
    )
    in_clipped_sequences = torch.where(total_clipped > 0, counts, 0)
    off_policy = None
    if masks:
        mean_log_ratio = total[0] / lengths.clamp_min(1)
        surrogate, off_policy = mask_off_policy(
            objective, surrogate, advantages, mean_log_ratio, segments
        )
    stats = RatioStats(
        log_ratio,
        ratio,
        clamped,
        segments.loss_mask,
        clip,
        clipped,
        in_clipped_sequences,
        off_policy,
    )
    return surrogate, lengths, stats


def sequence_level(
    objective: Objective, log_ratio: Tensor, advantages: Tensor, segments: Segments, *scores: Tensor
) -> Surrogate:
    """The surrogate of one length-normalised ratio per sequence."""
    counts, sums = segments.sums(segments.loss_mask), segments.sums(log_ratio.detach())
    total, lengths = segments.sum_ranks(sums, counts)
    mean_log_ratio = total / lengths.clamp_min(1)
    ratio, by_sequence, clamped = sequence_ratio(
        log_ratio, mean_log_ratio, segments.segment_ids, objective.max_log_ratio
    )
    surrogate, clip = SURROGATES[objective.surrogate](
        objective, ratio, advantages, log_ratio, *scores
    )
    # Equal advantages clip all of a sequence or nothing. Where they differ it counts by its clipped
    # part.
    clipped = segments.sums(clip.cut)
    surrogate, off_policy = mask_off_policy(
        objective, surrogate, advantages, mean_log_ratio, segments
    )
    stats = RatioStats(log_ratio, by_sequence, clamped, counts, clip, clipped, clipped, off_policy)
    return surrogate, lengths, stats


def geometric_mean_level(
    objective: Objective, log_ratio: Tensor, advantages: Tensor, segments: Segments, *_: Tensor
) -> Surrogate:
    """`exp(1/|y_i| sum_t clip(log_ratio_it)) * A_i` (arXiv:2507.20673): one ratio per sequence, of
    token log-ratios that are clipped above epsilon_high where A > 0, and below -epsilon_low where A
    < 0.

    Its gradient goes to the tokens that are not clipped, as that of `sequence_ratio`.
    """
    low, high = -objective.number("epsilon_low"), objective.number("epsilon_high")
    with torch.no_grad():
        lower, upper = (advantages < 0) & (log_ratio < low), (advantages > 0) & (log_ratio > high)
        clip = Clip(lower, lower | upper, None)
        bounded = torch.where(clip.cut, log_ratio.clamp(low, high), log_ratio)
    counts, clipped = segments.sums(segments.loss_mask), segments.sums(clip.cut)
    masks = objective.off_policy_mask_threshold is not None
    total, lengths, total_clipped, *unclipped = segments.sum_ranks(
        segments.sums(bounded),
        counts,
        clipped,
        *([segments.sums(log_ratio.detach())] if masks else []),
    )
    ratio, by_sequence, clamped = sequence_ratio(
        log_ratio, total / lengths.clamp_min(1), segments.segment_ids, objective.max_log_ratio
    )
    surrogate = torch.where(clip.cut, ratio.detach(), ratio) * advantages
    in_clipped_sequences = torch.where(total_clipped > 0, counts, 0)
    off_policy = None
    if masks:
        mean_log_ratio = unclipped[0] / lengths.clamp_min(1)
        surrogate, off_policy = mask_off_policy(
            objective, surrogate, advantages, mean_log_ratio, segments
        )
    stats = RatioStats(
        log_ratio, by_sequence, clamped, counts, clip, clipped, in_clipped_sequences, off_policy
    )
    return surrogate, lengths, stats


def mask_off_policy(
    objective: Objective,
    surrogate: Tensor,
    advantages: Tensor,
    mean_log_ratio: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor | None]:
    """The surrogate [T] with 0 where A < 0 and the sequence's mean log-ratio [n] is below
    -off_policy_mask_threshold (DeepSeek-V3.2, arXiv:2512.02556), and this rank's masked tokens by
    sequence [n]. Unchanged without a threshold.
    """
    threshold = objective.off_policy_mask_threshold
    if threshold is None:
        return surrogate, None
    masked = (advantages < 0) & (mean_log_ratio < -threshold).index_select(0, segments.segment_ids)
    return surrogate.masked_fill(masked, 0), segments.sums(masked)


RATIO_LEVELS: dict[ImportanceSamplingLevel, Callable[..., Surrogate]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_level,
    "geometric_mean": geometric_mean_level,
    "none": without_ratio,
}
