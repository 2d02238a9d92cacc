"""Log-probs of tokens that were drawn from a part of the vocabulary, by top-p, top-k or min-p."""

from __future__ import annotations

import torch
from torch import Tensor


def over_support(log_probs: Tensor, of_support: Tensor, is_present: Tensor) -> Tensor:
    """[T]: ``log p(y) - log sum_{v in S} p(v)``, with gradient, where S are the ids that the sampler
    could draw. Both policies of a ratio have the sampler's S, as the policy has not changed it.

    Args:
        log_probs: [T] of the tokens y over the whole vocabulary.
        of_support: [T, W] of the ids of S, in any order.
        is_present: [T, W] bool, False where S has fewer than W ids. A position without any is over
            the whole vocabulary.
    """
    has_support = is_present.any(1)
    # A position without ids has no gradient to them, and no infinity.
    masked = torch.where(is_present, of_support, -torch.inf)
    masked = torch.where(has_support[:, None], masked, 0.0)
    return log_probs - torch.where(has_support, masked.logsumexp(1), 0.0)
