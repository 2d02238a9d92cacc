"""Importance ratios: of single tokens, and of whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_ratio(log_ratio: Tensor, max_log_ratio: float) -> tuple[Tensor, Tensor]:
    """`w_it = exp(log_ratio)` (GRPO), and where the log-ratio was clamped: both [T].

    A clamped token keeps a finite ratio and has no gradient, also where the log-ratio is infinite.
    NaN stays NaN: a NaN log-prob comes from a broken model and must reach the loss.
    """
    ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio).exp()
    clamped = log_ratio.detach().abs() > max_log_ratio
    return ratio, clamped


class _OfSequence(torch.autograd.Function):
    """`value[segment_ids]` [T], with the gradient `slope[segment_ids]` to each token's own
    log-prob.
    """

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, value: Tensor, slope: Tensor, segment_ids: Tensor
    ) -> Tensor:
        ctx.save_for_backward(slope, segment_ids)
        return value.index_select(0, segment_ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        slope, segment_ids = ctx.saved_tensors
        return grad * slope.index_select(0, segment_ids), None, None, None


def sequence_ratio(
    log_probs: Tensor, mean_log_ratio: Tensor, segment_ids: Tensor, max_log_ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`s_it = sg[s_i] * exp(log_probs_it - sg[log_probs_it])` (GSPO-token, arXiv:2507.18071, eq.
    14).

    The value is exactly `s_i = exp(mean_log_ratio_i)` on every token. The gradient of a token's
    s_it is s_i and goes to that token's log-prob only; averaged over a response with equal
    advantages it is the gradient of s_i. So `mean_log_ratio` can come out of an all-reduce without
    autograd, and each context rank's own tokens still have their exact gradient.

    Args:
        log_probs: [T] with gradient; or anything that differs from it by a constant. Its values are
            not read.
        mean_log_ratio: [n] `1/|y_i| sum_t (log_probs - old_log_probs)` over the whole sequence, no
            gradient.
        segment_ids: [T] integers, 0..n-1.
        max_log_ratio: nats; clamps mean_log_ratio. A clamped sequence keeps a finite ratio and has
            no gradient, which is the derivative of the clamp.

    Returns:
        s_it [T] with gradient, and of each sequence s_i and whether it was clamped, both [n].
    """
    of_sequence, clamped = token_ratio(mean_log_ratio.detach(), max_log_ratio)
    of_sequence = of_sequence.to(log_probs.dtype)
    slope = of_sequence.masked_fill(clamped, 0)
    return _OfSequence.apply(log_probs, of_sequence, slope, segment_ids), of_sequence, clamped
