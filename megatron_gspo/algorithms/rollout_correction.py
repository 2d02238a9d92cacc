"""Training engine against inference engine: how far apart they score the same tokens, and a correction.

Both work once a rollout batch, on the log-probs of the training engine before the first update
(old_log_probs). The weights multiply the advantages: they are positive, so clipping is decided as before and
the surrogate is scaled.
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


def _log_cap(cap: float) -> float:
    if not cap >= 1:
        raise ValueError(f"cap = {cap!r}: give 1 or more, the largest weight")
    return math.log(cap)


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
    return d.clamp(max=_log_cap(cap)).exp()


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
    sums = torch.stack(
        [segment_sums(d, segment_ids, num_segments), segment_sums(mask, segment_ids, num_segments)]
    )
    if sum_over_context is not None:
        sums = sum_over_context(sums)
    mean = sums[0] / sums[1].clamp_min(1)
    return mean.clamp(max=_log_cap(cap)).exp().to(d.dtype).index_select(0, segment_ids)
