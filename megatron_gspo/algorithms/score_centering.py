"""Score centering: the loss without the drift of a rollout engine q that is not the policy p
(arXiv:2609.20807).

With tokens of q the expected gradient is E_q[A] E_q[w grad log p] + Cov_q(A, w grad log p), where w
is the weight of a token. On the policy's own samples the first term is 0. Elsewhere it moves the
policy whatever the rewards are. `centering` is what removes it: at each position

    C = sum_v sg[w(v) q(v)] log p(v)

times the advantage. It needs the engine's log-probs of its K most likely ids H. The others are
taken to be the policy's, scaled to the rest of the mass:

    q(v) = rho p(v),    rho = (1 - sum_H q) / max(1 - sum_H p, 1e-6)

As the probabilities sum to 1, their part is a sum over H too: with w(v) q(v) = alpha p(v) outside,
C = sum_H sg[w(v) q(v) - alpha p(v)] log p(v). It is exact where H is the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objectives.score_centering import ScoreCentering

_LEAST_MASS = 1e-6  # of the policy outside H: a share of less is rounding


def centering(
    score_centering: ScoreCentering, log_probs: Tensor, rollout_log_probs: Tensor
) -> Tensor:
    """[T]: C of each position, for the loss to add times the advantage.

    log_probs: [T, K] of the policy, with gradient. rollout_log_probs: [T, K] of the rollout engine,
    of its K most likely ids.
    """
    with torch.no_grad():
        p = log_probs.exp()
        q = rollout_log_probs.exp()
        rest_of_q = (1 - q.sum(1, keepdim=True)).clamp_min(0)  # rounding may exceed 1
        rest_of_p = (1 - p.sum(1, keepdim=True)).clamp_min(_LEAST_MASS)
        rho = rest_of_q / rest_of_p
        alpha = _weighted(score_centering, torch.ones_like(rho), rho)
        coefficients = _weighted(score_centering, p, q) - alpha * p
    return (coefficients * log_probs).sum(1)


def _weighted(score_centering: ScoreCentering, p: Tensor, q: Tensor) -> Tensor:
    """The weight times ``q``, of equal shapes. Nothing is divided by ``q``, which may be 0."""
    value = q
    if score_centering.bounds is not None:
        low, high = score_centering.bounds
        value = torch.minimum(torch.maximum(p, low * q), high * q)
    if score_centering.kept is not None:
        low, high = score_centering.kept
        value = torch.where((p >= low * q) & (p <= high * q), value, 0)
    return value
