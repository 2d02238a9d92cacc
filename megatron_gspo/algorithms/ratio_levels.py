"""The surrogate of each token at every importance_sampling_level: one function per level, the same signature.

    level(objective, log_ratio, advantages, segments) -> (surrogate, lengths, stats)

    log_ratio: [T] log_probs - old_log_probs, or log_probs without a ratio; 0 at untrained positions. It has the
        gradient of log_probs.
    advantages: [T], 0 at untrained positions.
    segments: the sequences; each function sums over the context ranks exactly once.
    surrogate: [T], to be maximised.
    lengths: [num_segments] float64, trained tokens of each sequence over all context ranks.
    stats: what `ratio_metrics` reports; None without a ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .metrics import RatioStats
from .objective import ImportanceSamplingLevel, Objective
from .ratio import sequence_ratio, token_ratio
from .segments import Segments
from .surrogate import clipped_surrogate

Surrogate = tuple[Tensor, Tensor, RatioStats | None]


def without_ratio(objective: Objective, log_probs: Tensor, advantages: Tensor, segments: Segments) -> Surrogate:
    """`A_it * log_probs_it`: supervised training."""
    counts = segments.sums(segments.loss_mask)
    _, lengths = segments.sum_ranks(torch.zeros_like(counts), counts)
    return log_probs * advantages, lengths, None


def token_level(objective: Objective, log_ratio: Tensor, advantages: Tensor, segments: Segments) -> Surrogate:
    """The clipped surrogate of one ratio per token."""
    ratio, clamped = token_ratio(log_ratio, objective.max_log_ratio)
    surrogate, clip = clipped_surrogate(objective, ratio, advantages)
    counts, clipped = segments.sums(segments.loss_mask), segments.sums(clip.cut)
    total_clipped, lengths = segments.sum_ranks(clipped, counts)
    in_clipped_sequences = torch.where(total_clipped > 0, counts, 0)
    stats = RatioStats(log_ratio, ratio, clamped, segments.loss_mask, clip, clipped, in_clipped_sequences)
    return surrogate, lengths, stats


def sequence_level(objective: Objective, log_ratio: Tensor, advantages: Tensor, segments: Segments) -> Surrogate:
    """The clipped surrogate of one length-normalised ratio per sequence."""
    counts, sums = segments.sums(segments.loss_mask), segments.sums(log_ratio.detach())
    total, lengths = segments.sum_ranks(sums, counts)
    mean_log_ratio = total / lengths.clamp_min(1)
    ratio, by_sequence, clamped = sequence_ratio(
        log_ratio, mean_log_ratio, segments.segment_ids, objective.max_log_ratio
    )
    surrogate, clip = clipped_surrogate(objective, ratio, advantages)
    # Equal advantages clip all of a sequence or nothing. Where they differ it counts by its clipped part.
    clipped = segments.sums(clip.cut)
    stats = RatioStats(log_ratio, by_sequence, clamped, counts, clip, clipped, clipped)
    return surrogate, lengths, stats


RATIO_LEVELS: dict[ImportanceSamplingLevel, Callable[[Objective, Tensor, Tensor, Segments], Surrogate]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_level,
    "none": without_ratio,
}
