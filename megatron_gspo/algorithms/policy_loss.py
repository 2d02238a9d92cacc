"""The policy loss of one packed micro-batch, on one rank, as a share of the global mini-batch's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .aggregation import Shares, segment_sums, token_shares
from .kl import kl_penalty
from .metrics import RatioFacts, no_ratio_metrics, ratio_metrics, share
from .objective import Objective
from .ratio import clipped_surrogate, sequence_ratio, token_ratio

SumOverContext = Callable[[Tensor], Tensor]


def policy_loss(
    objective: Objective,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | None,
    loss_mask: Tensor,
    segment_ids: Tensor,
    num_sequences: int | Tensor,
    num_tokens: int | Tensor | None = None,
    num_segments: int | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    sum_over_context: SumOverContext | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise and its metrics; both are shares: summed over micro-batches, context and
    data-parallel ranks they give the mini-batch's figures, whichever way it was cut.

    What is at untrained positions is never read: NaN or infinity there changes neither loss nor gradient.

    Args:
        objective: see `preset`.
        log_probs: [T] float32 (or float64), with gradient; entry t scores the token after position t.
        old_log_probs: [T], the policy before this rollout batch's first update. None only for sft.
        advantages: [T]; one value a response, repeated, or one a token for `gspo_token` and token-level
            ratios. At level `sequence` values that differ within a response give GSPO-token. None only
            without a ratio: 1 everywhere.
        loss_mask: [T]; nonzero where the policy chose the token.
        segment_ids: [T] integers, the sequence of each position, 0..num_segments-1.
        num_sequences: sequences with a trained token in the GLOBAL mini-batch (one optimizer step).
        num_tokens: trained tokens in the GLOBAL mini-batch. None: those of this call, over its context ranks;
            right only if the mini-batch is this one call.
        num_segments: number of sequences in this micro-batch. None reads segment_ids.max(), the only device
            synchronisation that this function can make; under context parallelism always give it.
        ref_log_probs: [T], needed where kl_loss_coef > 0; else only for the metric.
        entropy: [T], needed (with gradient) where entropy_coef > 0; else only for the metric.
        sum_over_context: adds a [2, num_segments] float64 tensor over the context ranks, without autograd.
            Called exactly once, whatever the objective. None: this rank holds whole sequences.

    Returns:
        loss: scalar in the dtype of log_probs.
        metrics: detached scalars, shares as well, except `*_max` and `*_min`: take the largest, the smallest.
            `finish_metrics` turns their sums into final figures.

    Raises:
        ValueError: an input is missing, has another shape, or is a float16 or bfloat16 log-prob; a global
            count below 1.
    """
    _check_counts(num_sequences, num_tokens)
    if num_segments is None:
        num_segments = int(segment_ids.max()) + 1 if segment_ids.numel() else 0
    raw = _Tokens(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        entropy=entropy,
        advantages=advantages,
        mask=loss_mask,
        segment_ids=segment_ids,
        num_segments=num_segments,
    )
    _check_inputs(objective, raw)
    tokens = _cleaned(raw)
    surrogate, facts, lengths = _surrogate(objective, tokens, sum_over_context or _identity)
    if num_tokens is None:
        num_tokens = lengths.sum().clamp_min(1)
    per_token_lengths = lengths.to(tokens.log_probs.dtype).index_select(0, tokens.segment_ids)
    shares = token_shares(objective, tokens.mask, per_token_lengths, num_sequences, num_tokens)

    loss = -share(surrogate, shares.of_objective)
    metrics = {"loss/policy": loss.detach()}
    if facts is not None:
        metrics |= ratio_metrics(objective, facts, tokens.log_ratio, tokens.mask, shares)
    else:
        metrics |= no_ratio_metrics(shares)
    return _add_regularisers(objective, tokens, shares, loss, metrics)


@dataclass(frozen=True)
class _Tokens:
    """The inputs, [T] each; once cleaned, 0 at untrained positions, so that nothing there can poison a
    sum.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    entropy: Tensor | None
    advantages: Tensor | None
    mask: Tensor
    segment_ids: Tensor
    num_segments: int

    @property
    def log_ratio(self) -> Tensor:
        assert self.old_log_probs is not None  # _check_inputs saw to it
        return self.log_probs - self.old_log_probs


def _surrogate(
    objective: Objective, tokens: _Tokens, sum_over_context: SumOverContext
) -> tuple[Tensor, RatioFacts | None, Tensor]:
    """Objective per token [T], what its ratio looked like, and |y_i| [n]; makes the one collective call.

    Row 0 of that call is what the level needs to know of the other ranks: the sum of log-ratios (sequence
    levels), or how many tokens were clipped (token level); row 1 is the count of trained tokens.
    """
    ids, n = tokens.segment_ids, tokens.num_segments
    assert tokens.advantages is not None  # _cleaned fills them in
    count = segment_sums(tokens.mask, ids, n)

    if objective.sequence_level:
        row = segment_sums(tokens.log_ratio.detach(), ids, n)
        total, lengths = sum_over_context(torch.stack([row, count])).unbind(0)
        mean_log_ratio = total / lengths.clamp_min(1)
        ratio, clamped = sequence_ratio(tokens.log_probs, mean_log_ratio, ids, objective.max_log_ratio)
        value, clip = clipped_surrogate(objective, ratio, tokens.advantages)
        # Equal advantages clip all of a sequence or nothing. Where they differ it counts by its clipped part.
        return value, RatioFacts(ratio, clip, clamped, clip.cut), lengths

    if objective.has_ratio:
        ratio, clamped = token_ratio(tokens.log_ratio, objective.max_log_ratio)
        value, clip = clipped_surrogate(objective, ratio, tokens.advantages)
        total, lengths = sum_over_context(torch.stack([segment_sums(clip.cut, ids, n), count])).unbind(0)
        return value, RatioFacts(ratio, clip, clamped, (total > 0).index_select(0, ids)), lengths

    lengths = sum_over_context(torch.stack([torch.zeros_like(count), count]))[1]
    return tokens.log_probs * tokens.advantages, None, lengths


def _add_regularisers(
    objective: Objective, tokens: _Tokens, shares: Shares, loss: Tensor, metrics: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL to the reference and entropy bonus, aggregated as the objective is; their token means as metrics."""
    limit = objective.max_log_ratio
    if tokens.ref_log_probs is not None:
        detached = tokens.log_probs.detach()
        kl_now = kl_penalty(detached, tokens.ref_log_probs, "k3", max_log_ratio=limit)
        metrics["kl/ref"] = share(kl_now, shares.of_tokens)
    if objective.kl_loss_coef > 0 and tokens.ref_log_probs is not None:
        kl = kl_penalty(tokens.log_probs, tokens.ref_log_probs, objective.kl_estimator, max_log_ratio=limit)
        term = objective.kl_loss_coef * share(kl, shares.of_objective)
        loss, metrics["loss/kl"] = loss + term, term.detach()
    if tokens.entropy is not None:
        metrics["entropy"] = share(tokens.entropy.detach(), shares.of_tokens)
    if objective.entropy_coef > 0 and tokens.entropy is not None:
        term = -objective.entropy_coef * share(tokens.entropy, shares.of_objective)
        loss, metrics["loss/entropy"] = loss + term, term.detach()
    return loss, metrics


def _cleaned(raw: _Tokens) -> _Tokens:
    """The same with a bool mask, 0 at untrained positions, and a gradient to log_probs and entropy only."""
    mask, dtype = raw.mask != 0, raw.log_probs.dtype

    def clean(x: Tensor) -> Tensor:
        # where, not a product: NaN * 0 is NaN, in the value and in the gradient.
        return torch.where(mask, x, 0).to(dtype)

    def constant(x: Tensor | None) -> Tensor | None:
        return None if x is None else clean(x.detach())

    return replace(
        raw,
        log_probs=clean(raw.log_probs),
        old_log_probs=constant(raw.old_log_probs),
        ref_log_probs=constant(raw.ref_log_probs),
        entropy=None if raw.entropy is None else clean(raw.entropy),
        advantages=mask.to(dtype) if raw.advantages is None else constant(raw.advantages),
        mask=mask,
    )


def _check_inputs(objective: Objective, raw: _Tokens) -> None:
    """Refuse what can't be right, from shapes and dtypes alone."""
    if objective.has_ratio and raw.old_log_probs is None:
        raise ValueError(f"old_log_probs = None: {objective.name} has a ratio, give the rollout policy's")
    if objective.has_ratio and raw.advantages is None:
        raise ValueError(f"advantages = None: {objective.name} needs them, see group_advantages")
    for key, needed_by in (("ref_log_probs", "kl_loss_coef"), ("entropy", "entropy_coef")):
        if getattr(objective, needed_by) > 0 and getattr(raw, key) is None:
            raise ValueError(
                f"{key} = None with {needed_by} = {getattr(objective, needed_by)!r}: give it, or 0"
            )
    shape = raw.log_probs.shape
    for f in fields(raw):
        value = getattr(raw, f.name)
        if isinstance(value, Tensor) and (value.dim() != 1 or value.shape != shape):
            key = "loss_mask" if f.name == "mask" else f.name
            raise ValueError(
                f"{key} is {tuple(value.shape)}, log_probs {tuple(shape)}: all must be [T], packed"
            )
    for key in ("log_probs", "old_log_probs", "ref_log_probs"):
        value = getattr(raw, key)
        if value is not None and value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{key} is {value.dtype}, wrong by up to 0.045 where the clip may be 3e-4: "
                "compute it in float32 (casting it afterwards does not help)"
            )
    if raw.segment_ids.is_floating_point():
        raise ValueError(f"segment_ids is {raw.segment_ids.dtype}: give integers")


def _check_counts(num_sequences: int | Tensor, num_tokens: int | Tensor | None) -> None:
    for key, value in (("num_sequences", num_sequences), ("num_tokens", num_tokens)):
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"{key} = {value}: nothing is trained in this mini-batch, skip its optimizer step"
            )


def _identity(x: Tensor) -> Tensor:
    return x
