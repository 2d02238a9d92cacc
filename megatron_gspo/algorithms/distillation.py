"""On-policy distillation: the divergence of the policy p from a teacher t, on samples of the
policy.

At each position the divergence is a sum over the vocabulary of terms that are 0 at p = t and
positive elsewhere:

    reverse   f(v) = p log(p / t) - p + t    d f / d log p = p log(p / t)     sums to KL(p || t)
    forward   f(v) = t log(t / p) - t + p    d f / d log p = p - t            sums to KL(t || p)

The terms of some ids S are computed (`divergence`), with p's gradient. The other terms have the
gradient of their sum estimated by the sampled token y, where it is not in S: as
``sum_v (d f / d log p) grad log p`` is the mean over y of ``(d f / d p)(y) grad log p(y)``, an
advantage of ``- d f / d p`` (`token_advantages`) gives it. It is unbiased where y is p's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objectives.distillation import Distillation

_MAX_LOG_RATIO = 20.0  # nats; of t / p, before exp


def divergence(distillation: Distillation, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """[T]: ``coef`` times the sum of the terms of K ids at each position.

    log_probs: [T, K] of the policy, with gradient. teacher_log_probs: [T, K].
    """
    teacher_log_probs = teacher_log_probs.detach()
    log_ratio = log_probs - teacher_log_probs
    p = log_probs.exp()
    t = teacher_log_probs.exp()
    reverse = p * log_ratio - p + t
    forward = p - t - t * log_ratio
    return mixed_divergence(distillation, reverse, forward).sum(1)


def mixed_divergence(distillation: Distillation, reverse: Tensor, forward: Tensor) -> Tensor:
    """[T]: ``coef`` times the weighted mean of KL(p || t) and KL(t || p) [T] over the vocabulary."""
    return distillation.coef * torch.lerp(reverse, forward, distillation.forward_weight)


def token_advantages(
    distillation: Distillation, log_probs: Tensor, teacher_log_probs: Tensor
) -> Tensor:
    """[T]: ``coef`` times ``- d f / d p`` at the sampled tokens; no gradient.

    log_probs, teacher_log_probs: [T] of the sampled tokens.
    """
    log_ratio = teacher_log_probs.detach() - log_probs.detach()
    forward = torch.expm1(log_ratio.clamp(max=_MAX_LOG_RATIO))
    return distillation.coef * torch.lerp(log_ratio, forward, distillation.forward_weight)
