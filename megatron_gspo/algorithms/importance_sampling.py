"""Corrections for the difference between the training engine and the rollout engine.

Both engines score the same tokens, with different rounding. All functions are called once per
rollout batch, on the log-probs of the training engine before the first update (old_log_probs).
Truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl): the weights multiply
the advantages. They are positive, so the clip decides as before and the surrogate is scaled.
Rejection (verl's rejection sampling, docs/algo/rollout_corr.md): tokens or sequences outside the
band are not trained on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kl import binary_kl, k3
from .segments import Segments

# Outside [1/2, 2] a token is scored as if by two models.
RATIO_BAND = 2.0


def _log_ratio(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`log_probs - rollout_log_probs` [T], 0 at untrained positions; and the mask."""
    mask = loss_mask != 0
    for key, value in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        if value.shape != mask.shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, loss_mask {tuple(mask.shape)}: all must"
                " be [T]"
            )
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log_probs is {log_probs.dtype}: compute it in float32")
    difference = log_probs - rollout_log_probs.to(log_probs.dtype)
    return torch.where(mask, difference, 0), mask


def _bounded(weights: Tensor, lower: float, threshold: float) -> Tensor:
    if not threshold >= 1:
        raise ValueError(f"threshold = {threshold!r}: must be 1 or more, it is the largest weight")
    if not 0 <= lower <= 1:
        raise ValueError(f"lower = {lower!r}: must be 0 to 1, it is the smallest weight")
    return weights.clamp(lower, threshold)


@torch.no_grad()
def mismatch_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, num_tokens: int | Tensor
) -> dict[str, Tensor]:
    """Train/rollout mismatch of the trained tokens, d = log_probs - rollout_log_probs; all inputs
    [T].

    Returns scalars: `mismatch/k3` (exp(d) - 1 - d, KL(rollout || training)), `mismatch/abs_diff`,
    `mismatch/outside_band` (tokens whose ratio is outside [1/2, 2]): shares, already divided by the
    global `num_tokens`; and `mismatch/abs_diff_max`, nats, of which the largest counts. An infinite
    d gives infinity.
    """
    d, _ = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    size = d.abs()
    return {
        "mismatch/k3": k3(d).sum() / num_tokens,
        "mismatch/abs_diff": size.sum() / num_tokens,
        "mismatch/abs_diff_max": size.amax() if size.numel() else size.new_zeros(()),
        "mismatch/outside_band": (size > math.log(RATIO_BAND)).sum() / num_tokens,
    }


@torch.no_grad()
def token_importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    threshold: float = 2.0,
    lower: float = 0.0,
) -> Tensor:
    """Importance weights truncated by token: `clamp(exp(d), lower, threshold)`, 1 where untrained.
    [T], no gradient.

    Raises ValueError unless 0 <= lower <= 1 <= threshold.
    """
    d, _ = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    return _bounded(d.exp(), lower, threshold)


@torch.no_grad()
def sequence_importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    segments: Segments,
    *,
    threshold: float = 2.0,
    lower: float = 0.0,
) -> Tensor:
    """Importance weights truncated by sequence: `clamp(exp(1/|y_i| sum_t d_it), lower, threshold)`.
    [T], no gradient.

    Length-normalised as GSPO's ratio is: the variance of exp of the plain sum grows with the
    length. Sums over the context ranks once. A sequence without a trained token gets 1. Raises
    ValueError unless 0 <= lower <= 1 <= threshold.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, segments.loss_mask)
    weights = _bounded(_sequence_means(d, mask, segments).exp(), lower, threshold).to(d.dtype)
    return weights.index_select(0, segments.segment_ids)


def token_rejection_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, lower: float, upper: float
) -> Tensor:
    """The trained tokens whose ratio `exp(d)` is in [lower, upper]: [T] bool, the new loss_mask.

    Raises ValueError unless 0 < lower <= 1 <= upper.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    return mask & _inside(d, lower, upper)


def sequence_rejection_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, segments: Segments, *, lower: float, upper: float
) -> Tensor:
    """The trained tokens of sequences whose ratio `exp(1/|y_i| sum_t d_it)` is in [lower, upper]:
    [T] bool.

    Sums over the context ranks once. Raises ValueError unless 0 < lower <= 1 <= upper.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, segments.loss_mask)
    inside = _inside(_sequence_means(d, mask, segments), lower, upper)
    return mask & inside.index_select(0, segments.segment_ids)


def token_divergence_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, largest: float
) -> Tensor:
    """The trained tokens whose binary KL between the engines, the larger of both directions, is at
    most `largest` nats (KPop): [T] bool.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    theirs = log_probs - d
    return mask & (
        torch.maximum(binary_kl(log_probs, theirs), binary_kl(theirs, log_probs)) <= largest
    )


def sequence_divergence_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, segments: Segments, *, largest: float
) -> Tensor:
    """The trained tokens of sequences whose mean of `exp(d) - 1 - d` is at most `largest` nats: [T]
    bool.

    Sums over the context ranks once.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, segments.loss_mask)
    kept = _sequence_means(k3(d), mask, segments) <= largest
    return mask & kept.index_select(0, segments.segment_ids)


def _inside(log_ratio: Tensor, lower: float, upper: float) -> Tensor:
    if not 0 < lower <= 1 <= upper:
        raise ValueError(f"lower = {lower!r}, upper = {upper!r}: must be 0 < lower <= 1 <= upper")
    return (log_ratio >= math.log(lower)) & (log_ratio <= math.log(upper))


def _sequence_means(d: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """Mean of `d` [T], 0 at untrained positions, over each sequence's trained tokens:
    [num_segments] float64, 0 where it has none."""
    total, lengths = segments.sum_ranks(segments.sums(d), segments.sums(mask))
    return total / lengths.clamp_min(1)
