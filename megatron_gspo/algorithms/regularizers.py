"""Terms of the loss beside the objective: the KL to a reference policy, the entropy bonus, the
divergence from a teacher and score centering.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from megatron_gspo.objectives.objective import Objective

from .aggregation import TokenWeights, weighted_sum
from .kl import kl_penalty
from .ratio import token_ratio
from .segments import Segments

Regularizer: TypeAlias = tuple[Tensor | None, dict[str, Tensor]]


def regularizers(
    objective: Objective,
    log_probs: Tensor,
    log_ratio: Tensor,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    divergence: Tensor | None,
    centering: Tensor | None,
    segments: Segments,
    weights: TokenWeights,
) -> list[Regularizer]:
    """(term to add to the loss or None, metrics) of each regulariser that has its inputs; all [T].

    Untrained positions are not read. log_ratio: `log_probs - old_log_probs`, 0 there; not read
    without a ratio.
    """
    dtype = log_probs.dtype
    terms = []
    if objective.log_ratio_coef > 0:
        terms.append(log_ratio_regularizer(objective, log_ratio, weights))
    if ref_log_probs is not None:
        reference = segments.trained(ref_log_probs.detach(), dtype)
        current = segments.trained(log_probs, dtype)
        terms.append(kl_regularizer(objective, current, reference, weights, log_ratio))
    if entropy is not None:
        terms.append(entropy_regularizer(objective, segments.trained(entropy, dtype), weights))
    for name, values in (("distillation", divergence), ("score_centering", centering)):
        if values is not None:
            term = weighted_sum(segments.trained(values, dtype), weights.objective)
            terms.append((term, {f"loss/{name}": term.detach()}))
    return terms


def log_ratio_regularizer(
    objective: Objective, log_ratio: Tensor, weights: TokenWeights
) -> Regularizer:
    """`log_ratio_coef * log_ratio^2` [T], aggregated as the objective is, and its metrics
    (arXiv:2602.02276).
    """
    limit = objective.max_log_ratio
    squares = log_ratio.clamp(-limit, limit).square()
    term = objective.log_ratio_coef * weighted_sum(squares, weights.objective)
    return term, {"loss/log_ratio": term.detach()}


def kl_regularizer(
    objective: Objective,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    weights: TokenWeights,
    log_ratio: Tensor,
) -> Regularizer:
    """`kl_loss_coef * KL(current || reference)`, aggregated as the objective is, and its metrics.

    The term is None where the coefficient is 0. With `unbiased_kl` each token counts
    `exp(log_ratio)` times, which has a gradient. `kl/ref` is the token mean of k3, for any
    estimator of the term.

    Args:
        log_probs, ref_log_probs, log_ratio: [T], 0 at untrained positions.
    """
    limit = objective.max_log_ratio
    kl = kl_penalty(log_probs, ref_log_probs, objective.kl_loss_type, max_log_ratio=limit)
    k3 = kl
    if objective.kl_loss_type != "k3":
        k3 = kl_penalty(log_probs, ref_log_probs, "k3", max_log_ratio=limit)
    metrics = {"kl/ref": weighted_sum(k3.detach(), weights.token)}
    if objective.kl_loss_coef <= 0:
        return None, metrics
    if objective.unbiased_kl:
        ratio, _ = token_ratio(log_ratio, limit)
        kl = kl * ratio
    term = objective.kl_loss_coef * weighted_sum(kl, weights.objective)
    return term, metrics | {"loss/kl": term.detach()}


def entropy_regularizer(
    objective: Objective, entropy: Tensor, weights: TokenWeights
) -> Regularizer:
    """`-entropy_coef * entropy`, aggregated as the objective is, and its metrics.

    entropy: [T], 0 at untrained positions. The term is None where the coefficient is 0.
    """
    metrics = {"entropy": weighted_sum(entropy.detach(), weights.token)}
    if objective.entropy_coef <= 0:
        return None, metrics
    term = -objective.entropy_coef * weighted_sum(entropy, weights.objective)
    return term, metrics | {"loss/entropy": term.detach()}
