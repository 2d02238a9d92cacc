"""The policy loss of one packed micro-batch on one rank, as a share of the global mini-batch's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .aggregation import token_weights, weighted_sum
from .metrics import ratio_metrics
from .objective import Objective
from .ratio_levels import RATIO_LEVELS
from .regularizers import entropy_regularizer, kl_regularizer
from .segments import Segments, SumOverContext


@dataclass(frozen=True)
class LossExtras:
    """Inputs of `policy_loss` that not every run has.

    Attributes:
        num_segments: number of sequences in this micro-batch. None reads segment_ids.max(), the only device
            synchronisation of the loss; required under context parallelism, where a rank may not hold the last one.
        ref_log_probs: [T], required where kl_loss_coef > 0, else only for the metric.
        entropy: [T], required (with gradient) where entropy_coef > 0, else only for the metric.
        sum_over_context: adds a [2, num_segments] float64 tensor over the context-parallel ranks, without autograd.
            Called exactly once, whatever the objective. None: this rank holds whole sequences.
    """

    num_segments: int | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_over_context: SumOverContext | None = None


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
    """The loss to minimise and its metrics. Both are shares: their sum over micro-batches, context-parallel and
    data-parallel ranks is the figure of the mini-batch, however it was divided.

    Values at untrained positions are never read: NaN or infinity there changes neither loss nor gradient.

    Args:
        objective: see `preset`.
        log_probs: [T] float32 (or float64), with gradient; entry t scores the token after position t.
        old_log_probs: [T], of the policy before the first update on this rollout batch. None only without a ratio.
        advantages: [T]; one value per response, repeated, or one per token for `gspo_token` and token-level ratios.
            At level `sequence`, values that differ within a response give GSPO-token. None only without a ratio: 1.
        loss_mask: [T]; nonzero where the policy chose the token.
        segment_ids: [T] integers, the sequence of each position, 0..num_segments-1.
        num_sequences: sequences with a trained token in the GLOBAL mini-batch (one optimizer step).
        num_tokens: trained tokens in the GLOBAL mini-batch. Required where loss_agg_mode is `token-mean`. Elsewhere
            None uses the tokens of this call: metrics per token are then right only if the mini-batch is one call.
        extras: inputs that not every run has.

    Returns:
        loss: scalar in the dtype of log_probs.
        metrics: detached scalars, shares as well, except `*_max` and `*_min`, of which the largest and the smallest
            count. `finish_metrics` turns their sums into final figures.

    Raises:
        ValueError: an input is missing, has another shape, or is a float16 or bfloat16 log-prob; a global count
            below 1.
    """
    extras = extras or LossExtras()
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "ref_log_probs": extras.ref_log_probs,
               "entropy": extras.entropy, "advantages": advantages, "loss_mask": loss_mask,
               "segment_ids": segment_ids}  # fmt: skip
    _check_counts(objective, num_sequences, num_tokens)
    _check_tensors(objective, tensors)
    mask, dtype = loss_mask.bool(), log_probs.dtype

    def trained(values: Tensor) -> Tensor:
        # where, not a product: NaN * 0 is NaN, in the value and in the gradient. One pass over all tokens per call.
        return torch.where(mask, values, 0).to(dtype)

    num_segments = _count_segments(segment_ids) if extras.num_segments is None else extras.num_segments
    segments = Segments(mask, segment_ids, num_segments, extras.sum_over_context)
    has_ratio = objective.has_ratio and old_log_probs is not None
    log_ratio = trained(log_probs - old_log_probs.detach() if has_ratio else log_probs)
    advantages = mask.to(dtype) if advantages is None else trained(advantages.detach())

    surrogate_of = RATIO_LEVELS[objective.importance_sampling_level]
    surrogate, lengths, stats = surrogate_of(objective, log_ratio, advantages, segments)
    weights = token_weights(objective, segment_ids, lengths, num_sequences, num_tokens, dtype)
    loss = -weighted_sum(surrogate, weights.objective)
    metrics = {"loss/policy": loss.detach(), **ratio_metrics(objective, stats, weights)}

    regularizers = []
    if extras.ref_log_probs is not None:
        reference = trained(extras.ref_log_probs.detach())
        regularizers.append(kl_regularizer(objective, trained(log_probs), reference, weights))
    if extras.entropy is not None:
        regularizers.append(entropy_regularizer(objective, trained(extras.entropy), weights))
    for term, term_metrics in regularizers:
        loss = loss if term is None else loss + term
        metrics |= term_metrics
    return loss, metrics


def _count_segments(segment_ids: Tensor) -> int:
    return int(segment_ids.max()) + 1 if segment_ids.numel() else 0


def _check_counts(objective: Objective, num_sequences: int | Tensor, num_tokens: int | Tensor | None) -> None:
    if num_tokens is None and objective.loss_agg_mode == "token-mean":
        raise ValueError(
            "num_tokens = None with loss_agg_mode = 'token-mean': give the trained tokens of the whole mini-batch, "
            "over all micro-batches and ranks"
        )
    for key, value in (("num_sequences", num_sequences), ("num_tokens", num_tokens)):
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key} = {value}: nothing is trained in this mini-batch, skip its optimizer step")


def _check_tensors(objective: Objective, tensors: dict[str, Tensor | None]) -> None:
    """Check presence, shapes and dtypes of the inputs; no value is read."""
    if objective.has_ratio and tensors["old_log_probs"] is None:
        raise ValueError(f"old_log_probs = None: {objective.name} has a ratio, give the rollout policy's log-probs")
    if objective.has_ratio and tensors["advantages"] is None:
        raise ValueError(f"advantages = None: {objective.name} needs them, see group_advantages")
    for key, coefficient in (("ref_log_probs", "kl_loss_coef"), ("entropy", "entropy_coef")):
        if getattr(objective, coefficient) > 0 and tensors[key] is None:
            value = getattr(objective, coefficient)
            raise ValueError(f"{key} = None with {coefficient} = {value!r}: give it, or set the coefficient to 0")
    given = {key: value for key, value in tensors.items() if value is not None}
    shape = given["log_probs"].shape
    for key, value in given.items():
        if value.dim() != 1 or value.shape != shape:
            raise ValueError(f"{key} is {tuple(value.shape)}, log_probs {tuple(shape)}: all must be [T], packed")
        if key.endswith("log_probs") and value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{key} is {value.dtype}, wrong by up to 0.045 where the clip may be 3e-4: "
                "compute it in float32 (casting it afterwards does not help)"
            )
    if given["segment_ids"].is_floating_point():
        raise ValueError(f"segment_ids is {given['segment_ids'].dtype}: must be integers")
