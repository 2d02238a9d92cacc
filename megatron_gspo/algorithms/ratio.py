"""Importance ratios, and the clipped surrogate made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective


def token_ratio(log_ratio: Tensor, max_log_ratio: float) -> tuple[Tensor, Tensor]:
    """`w_it = exp(log_ratio)` (GRPO), and where the log-ratio was clamped: both [T].

    A clamped token keeps a finite ratio and has no gradient, also where the log-ratio is infinite. NaN stays
    NaN: a NaN log-prob is a broken model, and hiding it would train on.
    """
    return log_ratio.clamp(-max_log_ratio, max_log_ratio).exp(), log_ratio.detach().abs() > max_log_ratio


def sequence_ratio(
    log_probs: Tensor, mean_log_ratio: Tensor, segment_ids: Tensor, max_log_ratio: float
) -> tuple[Tensor, Tensor]:
    """`s_it = sg[s_i] * exp(log_probs_it - sg[log_probs_it])` (GSPO-token, arXiv:2507.18071, eq. 14).

    The value is exactly `s_i = exp(mean_log_ratio_i)` on every token. The gradient of a token's s_it goes to
    that token's log-prob only; averaged over a response with equal advantages it is the gradient of s_i. So
    `mean_log_ratio` can come out of an all-reduce without autograd, and each context rank's own tokens still
    carry their exact gradient.

    Args:
        log_probs: [T] with gradient.
        mean_log_ratio: [n] `1/|y_i| sum_t (log_probs - old_log_probs)` over the whole sequence, no gradient.
        segment_ids: [T] integers, 0..n-1.
        max_log_ratio: nats; clamps mean_log_ratio. A clamped sequence keeps a finite ratio and has no
            gradient, which is the derivative of the clamp, and keeps `inf - inf` out of the identity.

    Returns:
        ratio and whether its sequence was clamped, both [T].
    """
    mean = mean_log_ratio.detach()
    value = mean.clamp(-max_log_ratio, max_log_ratio).exp().to(log_probs.dtype).index_select(0, segment_ids)
    clamped = (mean.abs() > max_log_ratio).index_select(0, segment_ids)
    # Replaced before exp, not after: torch.where passes 0 * NaN back through a branch that it did not take.
    live = torch.where(clamped, torch.zeros_like(log_probs), log_probs)
    return value * (live - live.detach()).exp(), clamped


@dataclass(frozen=True)
class Clip:
    """Where the gradient is cut, all [T] bool.

    `lower`: A < 0 and ratio < 1 - epsilon_low. `upper`: A > 0 and ratio > 1 + epsilon_high.
    `dual`: A < 0 and ratio > dual_clip.
    """

    lower: Tensor
    upper: Tensor
    dual: Tensor

    @property
    def cut(self) -> Tensor:
        """Clipped by the PPO rule (dual clip not included) [T] bool."""
        return self.lower | self.upper


def clipped_surrogate(objective: Objective, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Clip]:
    """`min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)`: to be maximised, all [T].

    Written as a choice instead of a min: where the clip binds the value is a constant times A, elsewhere
    ratio * A. That is the same number and gradient, and the clip metrics can't disagree with it.
    With `dual_clip` c the value is max(that, c * A) where A < 0 (arXiv:1912.09729, eq. 5).
    """
    with torch.no_grad():
        low, high = objective.clip_range
        lower = (advantages < 0) & (ratio < low)
        upper = (advantages > 0) & (ratio > high)
        dual = torch.zeros_like(lower)
        bound = torch.full_like(ratio, high).masked_fill(lower, low)
        if objective.dual_clip is not None:
            dual = (advantages < 0) & (ratio > objective.dual_clip)
            bound = bound.masked_fill(dual, objective.dual_clip)
    return torch.where(lower | upper | dual, bound, ratio) * advantages, Clip(lower, upper, dual)
