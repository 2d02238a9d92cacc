"""The policy loss of one packed micro-batch on one rank, as a share of the global mini-batch's
loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import Objective

from .aggregation import token_weights, weighted_sum
from .metrics import ratio_metrics
from .ratio_levels import RATIO_LEVELS
from .regularizers import regularizers
from .segments import Segments, SumOverContext
from .token_terms import Tokens


@dataclass(frozen=True)
class LossExtras:
    """Inputs of `policy_loss` that not every run has."""

    num_segments: int | None = None
    """Number of sequences in this micro-batch. None reads segment_ids.max(), the only device
    synchronisation of the loss; required under context parallelism, where a rank may not hold the
    last one."""

    ref_log_probs: Tensor | None = None
    """[T], required where kl_loss_coef > 0, else only for the metric."""

    entropy: Tensor | None = None
    """[T], required (with gradient) where entropy_coef > 0, else only for the metric."""

    sum_over_context: SumOverContext | None = None
    """Adds a [rows, num_segments] float64 tensor over the context-parallel ranks, without autograd.
    Called exactly once, for every objective. None: this rank holds whole sequences."""

    rollout_log_probs: Tensor | None = None
    """[T] of the rollout engine, required where the objective needs them (MiniRL)."""

    divergence: Tensor | None = None
    """[T] with gradient, from a teacher (`divergence`): added to the loss, aggregated as the
    objective is."""

    centering: Tensor | None = None
    """[T] with gradient (`centering`): times the advantage it is added to the loss, aggregated as
    the objective is."""

    centering_advantages: Tensor | None = None
    """[T], the advantages before weights by token multiplied them; None: they are the others. Not
    read where a response has one ratio."""


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
    extras: LossExtras | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise and its metrics, both as shares: their sum over micro-batches,
    context-parallel and data-parallel ranks is the figure of the mini-batch, however it was
    divided. All tensors are [T]. Values at untrained positions are never read: NaN there changes
    neither loss nor gradient.

    Args:
        log_probs: float32 (or float64), with gradient; entry t scores the token after position t.
        old_log_probs: of the policy before the first update on this rollout batch. None only
            without a ratio.
        advantages: one value per response, repeated, or one per token (which makes GSPO-token of
            level `sequence`). None only without a ratio: 1.
        loss_mask: nonzero where the policy chose the token.
        segment_ids: integers, the sequence of each position, 0..num_segments-1.
        num_sequences: sequences with a trained token in the GLOBAL mini-batch (one optimizer step).
        num_tokens: trained tokens in the GLOBAL mini-batch. Required where loss_agg_mode is
            `token-mean`; elsewhere None counts this call's tokens, and metrics per token are right
            only if the mini-batch is one call.

    Returns:
        loss: scalar in the dtype of log_probs; metrics: detached scalars, for `finish_metrics` once
            they are combined (`reduction_of` says which add up).

    Raises:
        ValueError: an input is missing, has another shape, or is a half-precision log-prob; a count
            below 1; a centering without a gradient of log_probs where a response has one ratio.
    """
    extras = extras or LossExtras()
    tensors = {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "ref_log_probs": extras.ref_log_probs,
        "rollout_log_probs": extras.rollout_log_probs,
        "entropy": extras.entropy,
        "divergence": extras.divergence,
        "centering": extras.centering,
        "centering_advantages": extras.centering_advantages,
        "advantages": advantages,
        "loss_mask": loss_mask,
        "segment_ids": segment_ids,
    }
    _check_counts(objective, num_sequences, num_tokens)
    _check_tensors(objective, tensors)
    num_segments = (
        _count_segments(segment_ids) if extras.num_segments is None else extras.num_segments
    )
    segments = Segments(loss_mask.bool(), segment_ids, num_segments, extras.sum_over_context)
    dtype = log_probs.dtype

    tokens = _tokens(objective, log_probs, old_log_probs, advantages, extras, segments)
    level = RATIO_LEVELS[objective.importance_sampling_level]
    surrogate, lengths, stats = level(objective, tokens)
    centering = None
    if extras.centering is not None:
        centering = extras.centering * _centred(objective, surrogate, log_probs, tokens, extras)
    weights = token_weights(objective, segment_ids, lengths, num_sequences, num_tokens, dtype)
    loss = -weighted_sum(surrogate, weights.objective)
    metrics = {"loss/policy": loss.detach(), **ratio_metrics(objective, stats, weights)}
    for term, term_metrics in regularizers(
        objective,
        log_probs,
        tokens.log_ratio,
        extras.ref_log_probs,
        extras.entropy,
        extras.divergence,
        centering,
        segments,
        weights,
    ):
        loss = loss if term is None else loss + term
        metrics |= term_metrics
    return loss, metrics


def _tokens(
    objective: Objective,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | None,
    extras: LossExtras,
    segments: Segments,
) -> Tokens:
    """The inputs at trained positions, 0 elsewhere."""
    dtype = log_probs.dtype
    current = segments.trained(log_probs, dtype)
    old = torch.zeros_like(log_probs)
    log_ratio = current
    if objective.has_ratio and old_log_probs is not None:
        old = segments.trained(old_log_probs.detach(), dtype)
        log_ratio = segments.trained(log_probs - old_log_probs.detach(), dtype)
    if advantages is None:
        advantages = torch.ones_like(log_probs)
    rollout_log_probs = None
    if objective.reads_rollout_log_probs and extras.rollout_log_probs is not None:
        rollout_log_probs = segments.trained(extras.rollout_log_probs.detach(), dtype)
    return Tokens(
        log_probs=current,
        old_log_probs=old,
        rollout_log_probs=rollout_log_probs,
        log_ratio=log_ratio,
        advantages=segments.trained(advantages.detach(), dtype),
        segments=segments,
    )


def _centred(
    objective: Objective, surrogate: Tensor, log_probs: Tensor, tokens: Tokens, extras: LossExtras
) -> Tensor:
    """[T], what multiplies the centering of each token; no gradient.

    Where a token has its own ratio, the weight of every token of the vocabulary is in the centering
    and the advantage is left. The ratio of a response is not a function of one token: what multiplies
    the token's score, by advantage, ratio and clip, multiplies the centering too.
    """
    if objective.sequence_level:
        if not surrogate.requires_grad:
            raise ValueError(
                f"centering with {objective.name} needs the gradient of log_probs, which weighs it:"
                " give log_probs with gradient, outside of torch.no_grad, or centering = None"
            )
        (slopes,) = torch.autograd.grad(surrogate.sum(), log_probs, retain_graph=True)
        return slopes
    if extras.centering_advantages is None:
        return tokens.advantages
    return tokens.segments.trained(extras.centering_advantages.detach(), log_probs.dtype)


def _count_segments(segment_ids: Tensor) -> int:
    return int(segment_ids.max()) + 1 if segment_ids.numel() else 0


def _check_counts(
    objective: Objective, num_sequences: int | Tensor, num_tokens: int | Tensor | None
) -> None:
    if num_tokens is None and objective.loss_agg_mode == "token-mean":
        raise ValueError(
            "num_tokens = None with loss_agg_mode = 'token-mean': give the trained tokens of the"
            " whole mini-batch, over all micro-batches and ranks"
        )
    for key, value in (("num_sequences", num_sequences), ("num_tokens", num_tokens)):
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"{key} = {value}: nothing is trained in this mini-batch, skip its optimizer step"
            )


def _check_tensors(objective: Objective, tensors: dict[str, Tensor | None]) -> None:
    """Check presence, shapes and dtypes of the inputs; no value is read."""
    if objective.has_ratio and tensors["old_log_probs"] is None:
        raise ValueError(
            f"old_log_probs = None: {objective.name} has a ratio, give the rollout policy's"
            " log-probs"
        )
    if objective.has_ratio and tensors["advantages"] is None:
        raise ValueError(f"advantages = None: {objective.name} needs them, see group_advantages")
    if objective.needs_rollout_log_probs and tensors["rollout_log_probs"] is None:
        raise ValueError(
            f"rollout_log_probs = None: {objective.name} weighs by them, give the rollout engine's"
        )
    for key, coefficient in (("ref_log_probs", "kl_loss_coef"), ("entropy", "entropy_coef")):
        if getattr(objective, coefficient) > 0 and tensors[key] is None:
            value = getattr(objective, coefficient)
            raise ValueError(
                f"{key} = None with {coefficient} = {value!r}: give it, or set the coefficient to 0"
            )
    given = {key: value for key, value in tensors.items() if value is not None}
    shape = given["log_probs"].shape
    for key, value in given.items():
        if value.dim() != 1 or value.shape != shape:
            raise ValueError(
                f"{key} is {tuple(value.shape)}, log_probs {tuple(shape)}: all must be [T], packed"
            )
        if key.endswith("log_probs") and value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{key} is {value.dtype}, wrong by up to 0.045 where the clip may be 3e-4: "
                "compute it in float32 (casting it afterwards does not help)"
            )
    if given["segment_ids"].is_floating_point():
        raise ValueError(f"segment_ids is {given['segment_ids'].dtype}: must be integers")
