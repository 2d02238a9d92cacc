"""The policy loss of one packed micro-batch, on one rank, as a share of the global mini-batch's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .aggregation import Shares, segment_sums, share, token_shares
from .kl import kl_penalty
from .metrics import RatioFacts, no_ratio_metrics, ratio_metrics
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
    inputs = _Inputs(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        entropy=entropy,
        advantages=advantages,
        loss_mask=loss_mask,
        segment_ids=segment_ids,
    )
    _check_inputs(objective, inputs)
    tokens = _cleaned(objective, inputs, num_segments)
    surrogate, facts, lengths = _surrogate(objective, tokens, sum_over_context or _identity)
    if num_tokens is None:
        num_tokens = lengths.sum().clamp_min(1)
    shares = token_shares(objective, segment_ids, lengths, num_sequences, num_tokens, log_probs.dtype)

    loss = -share(surrogate, shares.of_objective)
    metrics = {"loss/policy": loss.detach()}
    metrics |= no_ratio_metrics(shares) if facts is None else ratio_metrics(objective, facts, shares)
    return _add_regularisers(objective, tokens, shares, loss, metrics)


@dataclass(frozen=True)
class _Inputs:
    """As they were given, [T] each."""

    log_probs: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    entropy: Tensor | None
    advantages: Tensor | None
    loss_mask: Tensor
    segment_ids: Tensor


@dataclass(frozen=True)
class _Tokens:
    """What the loss reads of them, [T] each: 0 at untrained positions, so that nothing there can poison a sum.

    `log_ratio` is log_probs - old_log_probs, or log_probs for an objective without a ratio; `to_reference`
    are log_probs and ref_log_probs. The gradient goes to log_probs and entropy only.
    """

    mask: Tensor
    segment_ids: Tensor
    num_segments: int
    log_ratio: Tensor
    advantages: Tensor
    to_reference: tuple[Tensor, Tensor] | None
    entropy: Tensor | None


def _surrogate(
    objective: Objective, tokens: _Tokens, sum_over_context: SumOverContext
) -> tuple[Tensor, RatioFacts | None, Tensor]:
    """Objective per token [T], what its ratio looked like, and |y_i| [n]; makes the one collective call.

    Row 0 of that call is what the level needs to know of the other ranks: the sum of log-ratios (sequence
    levels), or how many tokens were clipped (token level); row 1 is the count of trained tokens.
    """
    ids, n, log_ratio = tokens.segment_ids, tokens.num_segments, tokens.log_ratio
    count = segment_sums(tokens.mask, ids, n)

    if not objective.has_ratio:
        lengths = sum_over_context(torch.stack([torch.zeros_like(count), count]))[1]
        return log_ratio * tokens.advantages, None, lengths

    if objective.sequence_level:
        row = segment_sums(log_ratio.detach(), ids, n)
        total, lengths = sum_over_context(torch.stack([row, count])).unbind(0)
        mean_log_ratio = total / lengths.clamp_min(1)
        ratio, of_sequence, clamped = sequence_ratio(log_ratio, mean_log_ratio, ids, objective.max_log_ratio)
        value, clip = clipped_surrogate(objective, ratio, tokens.advantages)
        # Equal advantages clip all of a sequence or nothing. Where they differ it counts by its clipped part.
        cut = segment_sums(clip.cut, ids, n)
        return value, RatioFacts(log_ratio, of_sequence, clamped, count, clip, cut, cut), lengths

    ratio, clamped = token_ratio(log_ratio, objective.max_log_ratio)
    value, clip = clipped_surrogate(objective, ratio, tokens.advantages)
    cut = segment_sums(clip.cut, ids, n)
    total, lengths = sum_over_context(torch.stack([cut, count])).unbind(0)
    in_cut_sequences = torch.where(total > 0, count, 0)
    return value, RatioFacts(log_ratio, ratio, clamped, tokens.mask, clip, cut, in_cut_sequences), lengths


def _add_regularisers(
    objective: Objective, tokens: _Tokens, shares: Shares, loss: Tensor, metrics: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL to the reference and entropy bonus, aggregated as the objective is; their token means as metrics."""
    if tokens.to_reference is not None:
        log_probs, reference = tokens.to_reference
        limit = objective.max_log_ratio
        kl = kl_penalty(log_probs, reference, objective.kl_loss_type, max_log_ratio=limit)
        k3_now = kl if objective.kl_loss_type == "k3" else kl_penalty(log_probs, reference, max_log_ratio=limit)
        metrics["kl/ref"] = share(k3_now.detach(), shares.of_tokens)
        if objective.kl_loss_coef > 0:
            term = objective.kl_loss_coef * share(kl, shares.of_objective)
            loss, metrics["loss/kl"] = loss + term, term.detach()
    if tokens.entropy is not None:
        metrics["entropy"] = share(tokens.entropy.detach(), shares.of_tokens)
        if objective.entropy_coef > 0:
            term = -objective.entropy_coef * share(tokens.entropy, shares.of_objective)
            loss, metrics["loss/entropy"] = loss + term, term.detach()
    return loss, metrics


def _cleaned(objective: Objective, inputs: _Inputs, num_segments: int) -> _Tokens:
    """What the objective reads; each `clean` is a pass over all tokens, so nothing else is."""
    mask, dtype = inputs.loss_mask.bool(), inputs.log_probs.dtype

    def clean(x: Tensor) -> Tensor:
        # where, not a product: NaN * 0 is NaN, in the value and in the gradient.
        return torch.where(mask, x, 0).to(dtype)

    log_probs, old, ref = inputs.log_probs, inputs.old_log_probs, inputs.ref_log_probs
    return _Tokens(
        mask=mask,
        segment_ids=inputs.segment_ids,
        num_segments=num_segments,
        log_ratio=clean(log_probs - old.detach() if objective.has_ratio and old is not None else log_probs),
        advantages=mask.to(dtype) if inputs.advantages is None else clean(inputs.advantages.detach()),
        to_reference=None if ref is None else (clean(log_probs), clean(ref.detach())),
        entropy=None if inputs.entropy is None else clean(inputs.entropy),
    )


def _check_inputs(objective: Objective, inputs: _Inputs) -> None:
    """Refuse what can't be right, from shapes and dtypes alone."""
    if objective.has_ratio and inputs.old_log_probs is None:
        raise ValueError(f"old_log_probs = None: {objective.name} has a ratio, give the rollout policy's")
    if objective.has_ratio and inputs.advantages is None:
        raise ValueError(f"advantages = None: {objective.name} needs them, see group_advantages")
    for key, needed_by in (("ref_log_probs", "kl_loss_coef"), ("entropy", "entropy_coef")):
        if getattr(objective, needed_by) > 0 and getattr(inputs, key) is None:
            raise ValueError(
                f"{key} = None with {needed_by} = {getattr(objective, needed_by)!r}: give it, or 0"
            )
    shape = inputs.log_probs.shape
    for f in fields(inputs):
        value = getattr(inputs, f.name)
        if isinstance(value, Tensor) and (value.dim() != 1 or value.shape != shape):
            raise ValueError(
                f"{f.name} is {tuple(value.shape)}, log_probs {tuple(shape)}: all must be [T], packed"
            )
    for key in ("log_probs", "old_log_probs", "ref_log_probs"):
        value = getattr(inputs, key)
        if value is not None and value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{key} is {value.dtype}, wrong by up to 0.045 where the clip may be 3e-4: "
                "compute it in float32 (casting it afterwards does not help)"
            )
    if inputs.segment_ids.is_floating_point():
        raise ValueError(f"segment_ids is {inputs.segment_ids.dtype}: give integers")


def _check_counts(num_sequences: int | Tensor, num_tokens: int | Tensor | None) -> None:
    for key, value in (("num_sequences", num_sequences), ("num_tokens", num_tokens)):
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"{key} = {value}: nothing is trained in this mini-batch, skip its optimizer step"
            )


def _identity(x: Tensor) -> Tensor:
    return x
