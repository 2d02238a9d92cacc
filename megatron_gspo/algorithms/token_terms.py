"""What a surrogate reads of a packed micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .segments import Segments


@dataclass(frozen=True)
class Tokens:
    """The tokens of one packed micro-batch on one rank; every tensor is [T], in the dtype of
    log_probs, and 0 at untrained positions.
    """

    log_probs: Tensor
    """Of the policy, with gradient."""
    old_log_probs: Tensor
    """Of the policy before the first update on this rollout batch."""
    rollout_log_probs: Tensor | None
    """Of the rollout engine; None where it gives none, or where the surrogate reads none."""
    log_ratio: Tensor
    """log_probs - old_log_probs, with gradient; log_probs without a ratio."""
    advantages: Tensor
    segments: Segments
    """The responses. `segments.loss_mask` [T] bool is True where a token is trained, and
    `segments.segment_ids` [T] numbers its response. `segments.sum_ranks(segments.sums(values))`
    adds values [T] by response over the context-parallel ranks, without gradient; every rank must
    call it as often as the others."""

    def with_ratio(self, ratio: Tensor) -> TokenTerms:
        """What the surrogate reads."""
        return TokenTerms(**vars(self), ratio=ratio)


@dataclass(frozen=True)
class TokenTerms(Tokens):
    """The argument of a surrogate."""

    ratio: Tensor
    """The importance ratio of the token, or of its response, repeated, by
    `importance_sampling_level`; with a gradient to the token's own log-prob."""
