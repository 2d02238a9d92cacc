"""Schulman's estimators of KL(current || reference) from the sampled tokens alone."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import KLLossType


def k3(log_ratio: Tensor) -> Tensor:
    """`exp(d) - 1 - d` with d = `log_ratio`, any shape: at least 0, 0 only at d = 0.

    With d = log(q / p) on samples of p, its mean estimates KL(p || q). expm1 keeps the digits where
    d is small.
    """
    return torch.expm1(log_ratio) - log_ratio


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p log(p / q) + (1 - p) log((1 - p) / (1 - q))` [T] with p = exp(log_p): the KL of "this
    token or another", nats.

    The probabilities of all other tokens have 1e-8 added, as in verl, since they may be 0.
    """
    p = log_p.exp()
    other_p = (1 - p).clamp_min(0)  # rounding may exceed 1
    other_q = (1 - log_q.exp()).clamp_min(0)
    return p * (log_p - log_q) + other_p * torch.log((other_p + 1e-8) / (other_q + 1e-8))


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: KLLossType = "k3",
    *,
    max_log_ratio: float = 20.0,
) -> Tensor:
    """Per-token estimate of KL(current || reference), d = log_probs - ref_log_probs
    (joschu.net/blog/kl-approx.html).

    `k1` = d: unbiased, either sign. For shaping a reward; as a loss its expected gradient is 0.
    `k2` = d^2 / 2: biased; as a loss its gradient is that of the KL.
    `k3` = exp(-d) - 1 + d: unbiased, never negative.

    Args:
        log_probs: [T] float32 of the sampled tokens; the gradient flows to it.
        ref_log_probs: [T], taken as a constant.
        max_log_ratio: nats; k2 and k3 clamp d to +-this, so a token beyond it has a finite value
            and no gradient.

    Returns:
        [T] in the dtype of `log_probs`, not masked and not scaled by a coefficient.

    Raises:
        ValueError: unknown estimator.
    """
    difference = log_probs - ref_log_probs.detach()
    if estimator == "k1":
        return difference
    if estimator not in get_args(KLLossType):
        raise ValueError(
            f"kl_loss_type = {estimator!r}: must be one of {', '.join(get_args(KLLossType))}"
        )
    # Clamp d as a whole: clamping only inside exp would leave the gradient of the linear term,
    # which has the wrong sign.
    difference = difference.clamp(-max_log_ratio, max_log_ratio)
    if estimator == "k2":
        return 0.5 * difference.square()
    return k3(-difference)
