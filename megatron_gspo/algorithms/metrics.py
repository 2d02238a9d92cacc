"""Metrics of one policy-loss call, as shares that sum over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import Objective

from .aggregation import TokenWeights, weighted_sum
from .importance_sampling import RATIO_BAND
from .kl import k3
from .reduction import Reduction, reduction_of
from .surrogate import Clip


@dataclass(frozen=True)
class RatioStats:
    """Importance ratios of one call, and what the clip removed."""

    log_ratio: Tensor
    """[T], of each token: log_probs - old_log_probs."""

    ratio: Tensor
    """[n] per sequence or [T] per token, by the ratio level."""

    clamped: Tensor
    """[n] or [T] as `ratio`, bool: whether its log-ratio was clamped."""

    counts: Tensor
    """The trained tokens that this rank holds of each ratio: a count [n], or the mask [T]."""

    clip: Clip
    """The tokens that the surrogate clips."""

    clipped: Tensor
    """[n], clipped tokens of each sequence on this rank."""

    in_clipped_sequences: Tensor
    """[n], this rank's trained tokens that stand for a clipped sequence."""

    off_policy: Tensor | None
    """[n], this rank's trained tokens that the off-policy mask removes; None without one."""


def _extreme(
    values: Tensor, trained: Tensor, reduce: Callable[[Tensor], Tensor], neutral: float
) -> Tensor:
    """Largest or smallest of the trained values; `neutral`, which loses to any other rank's,
    where there is none.
    """
    if not values.numel():
        return values.new_full((), neutral)
    return reduce(torch.where(trained, values, neutral))


@torch.no_grad()
def ratio_metrics(
    objective: Objective, stats: RatioStats | None, weights: TokenWeights
) -> dict[str, Tensor]:
    """Clip fractions, moments and extremes of the ratio, KL to the old policy, and the share of
    tokens whose ratio is outside [1/2, 2]; scalars.

    `ratio/*` and `log_ratio_clamped` are over sequences or tokens, by the ratio level. Without a
    ratio (`stats` None) there are only the clip fractions, which are 0.
    """
    if stats is None:
        zero = torch.zeros_like(weights.token)
        return {f"clip_fraction/{what}": zero for what in ("tokens", "sequences", "lower", "upper")}
    trained = stats.counts != 0
    limit = objective.max_log_ratio
    dtype = stats.ratio.dtype
    unit = stats.counts.to(dtype) * weights.sequence if objective.sequence_level else weights.token
    # Moments about 1, not about the mean: they are additive, and GSPO's deviation of 1e-4 survives
    # float32. 0 where nothing is trained.
    deviation = stats.ratio - 1
    cut = stats.clipped.sum().to(dtype) * weights.token
    lower = weighted_sum(stats.clip.lower, weights.token)
    metrics = {
        "clip_fraction/tokens": cut,
        "clip_fraction/sequences": weighted_sum(
            stats.in_clipped_sequences.to(dtype), weights.sequence
        ),
        "clip_fraction/lower": lower,
        "clip_fraction/upper": cut - lower,
        "ratio/mean": weighted_sum(trained, unit) + weighted_sum(deviation, unit),
        "ratio/square_deviation": weighted_sum(deviation.square(), unit),
        "ratio_max": _extreme(stats.ratio, trained, torch.amax, -math.inf),
        "ratio_min": _extreme(stats.ratio, trained, torch.amin, math.inf),
        "log_ratio_clamped": weighted_sum(stats.clamped, unit),
        # log_ratio is log(current / old) on samples of the old policy: this estimates KL(old ||
        # current).
        "kl/old_policy": weighted_sum(k3(stats.log_ratio.clamp(-limit, limit)), weights.token),
        "ratio_token/outside_band": weighted_sum(
            stats.log_ratio.abs() > math.log(RATIO_BAND), weights.token
        ),
    }
    if stats.off_policy is not None:
        metrics["off_policy_mask/sequences"] = weighted_sum(
            stats.off_policy.to(dtype), weights.sequence
        )
    if stats.clip.dual is not None:
        metrics["clip_fraction/dual"] = weighted_sum(stats.clip.dual, weights.token)
    return metrics


def finish_metrics(summed: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Final figures from shares summed over all micro-batches and ranks.

    Args:
        summed: metric of `policy_loss` -> the sum of its shares, or the largest or smallest value
            of an extreme (`reduction_of`).

    Returns:
        The same as floats (a device synchronisation), with `ratio/square_deviation` replaced by
        `ratio/std` and `effective_sample_size`: (sum w)^2 / sum w^2 / n in (0, 1], with w the
        importance ratios and n their number. Extremes over nothing (+-inf) are removed.
    """
    final: dict[str, float] = {}
    for name, value in summed.items():
        number = float(value)
        is_extreme = reduction_of(name) is not Reduction.SUM
        if not (is_extreme and math.isinf(number)):
            final[name] = number
    if "ratio/square_deviation" in final:
        deviation = final.pop("ratio/square_deviation")
        mean = final["ratio/mean"]
        final["ratio/std"] = math.sqrt(max(deviation - (mean - 1) ** 2, 0.0))
        mean_square = deviation + 2 * mean - 1
        final["effective_sample_size"] = min(mean**2 / mean_square, 1.0) if mean_square > 0 else 0.0
    return final
