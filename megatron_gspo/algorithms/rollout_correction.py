"""Training engine against inference engine: how far apart they score the same tokens, and what to do about it.

All work once a rollout batch, on the log-probs of the training engine before the first update
(old_log_probs). Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): the weights multiply
the advantages; they are positive, so clipping is decided as before and the surrogate is scaled. Masking (verl's
rejection sampling, docs/algo/rollout_corr.md): what leaves the band is not trained on at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .aggregation import segment_sums
from .kl import k3

# A token whose ratio leaves [1/2, 2] is scored by the two engines as if by two models.
RATIO_BAND = 2.0


def _log_ratio(log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """`log_probs - rollout_log_probs` [T], 0 at untrained positions; and the mask."""
    mask = loss_mask != 0
    for key, value in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        if value.shape != mask.shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, loss_mask {tuple(mask.shape)}: all must be [T]"
            )
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log_probs is {log_probs.dtype}: compute it in float32")
    difference = log_probs - rollout_log_probs.to(log_probs.dtype)
    return torch.where(mask, difference, 0), mask


def _checked(cap: float) -> float:
    if not cap >= 1:
        raise ValueError(f"cap = {cap!r}: give 1 or more, the largest weight")
    return cap


@torch.no_grad()
def mismatch_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, num_tokens: int | Tensor
) -> dict[str, Tensor]:
    """Train/rollout mismatch of the trained tokens, d = log_probs - rollout_log_probs; all inputs [T].

    Returns scalars: `mismatch/k3` (exp(d) - 1 - d, KL(rollout || training)), `mismatch/abs_diff`,
    `mismatch/outside_band` (tokens whose ratio leaves [1/2, 2]): shares, already divided by the global
    `num_tokens`; and `mismatch/abs_diff_max`, nats, of which the largest counts. An infinite d shows as
    infinite.
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
def token_correction_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Importance weights truncated by token: `min(exp(d), cap)`, 1 where untrained. [T], no gradient."""
    d, _ = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    return d.exp().clamp(max=_checked(cap))


@torch.no_grad()
def sequence_correction_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    cap: float = 2.0,
    sum_over_context: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Importance weights truncated by sequence: `min(exp(1/|y_i| sum_t d_it), cap)`. [T], no gradient.

    Length-normalised as GSPO's own ratio is: exp of the plain sum has a variance that grows with the length.
    Calls `sum_over_context` once, with [2, num_segments] float64. A sequence without a trained token gets 1.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    mean = _sequence_means(d, mask, segment_ids, num_segments, sum_over_context)
    return mean.exp().clamp(max=_checked(cap)).to(d.dtype).index_select(0, segment_ids)


@torch.no_grad()
def token_band_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, low: float, high: float
) -> Tensor:
    """The trained tokens whose ratio `exp(d)` lies in [low, high]: [T] bool, the loss_mask to go on with.

    Raises ValueError unless 0 < low <= 1 <= high.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    return mask & _inside(d, low, high)


@torch.no_grad()
def sequence_band_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
    sum_over_context: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The trained tokens of sequences whose ratio `exp(1/|y_i| sum_t d_it)` lies in [low, high]: [T] bool.

    Calls `sum_over_context` once, with [2, num_segments] float64. Raises ValueError unless 0 < low <= 1 <= high.
    """
    d, mask = _log_ratio(log_probs, rollout_log_probs, loss_mask)
    mean = _sequence_means(d, mask, segment_ids, num_segments, sum_over_context)
    return mask & _inside(mean, low, high).index_select(0, segment_ids)


def _inside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0 < low <= 1 <= high:
        raise ValueError(f"low = {low!r}, high = {high!r}: give 0 < low <= 1 <= high")
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _sequence_means(
    d: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    sum_over_context: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Mean log-ratio of each sequence's trained tokens [num_segments] float64, 0 where it has none."""
    sums = torch.stack(
        [segment_sums(d, segment_ids, num_segments), segment_sums(mask, segment_ids, num_segments)]
    )
    if sum_over_context is not None:
        sums = sum_over_context(sums)
    return sums[0] / sums[1].clamp_min(1)
