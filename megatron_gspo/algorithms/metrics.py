"""Figures of one policy-loss call, as shares that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .aggregation import Shares
from .kl import k3
from .objective import Objective
from .ratio import Clip


@dataclass(frozen=True)
class RatioFacts:
    """What the surrogate saw, all [T]: ratio, PPO clip, log-ratio clamp, tokens of clipped sequences.

    `sequence_cut` is 1 on every owned token of a clipped sequence, so that its shares add up to one sequence.
    """

    ratio: Tensor
    clip: Clip
    clamped: Tensor
    sequence_cut: Tensor


def share(values: Tensor, shares: Tensor) -> Tensor:
    """`sum(values * shares)`, a scalar; `values` [T], bool or floating, must be finite where shares are 0."""
    if values.dtype == torch.bool:  # without a floating copy of the values
        return shares.masked_fill(~values, 0).sum()
    return (values * shares).sum()


def _extreme(values: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor], nothing: float) -> Tensor:
    """Largest or smallest of the trained values; `nothing` where there is none, which loses to any other
    rank's.
    """
    if not values.numel():
        return values.new_full((), nothing)
    return reduce(values.masked_fill(~mask, nothing))


@torch.no_grad()
def ratio_metrics(
    objective: Objective, facts: RatioFacts, log_ratio: Tensor, mask: Tensor, shares: Shares
) -> dict[str, Tensor]:
    """Clip fractions, moments and extremes of the ratio, KL to the old policy; scalars.

    `ratio/*` and `log_ratio_clamped` count what one ratio covers: sequences or tokens, by the level.
    """
    unit = shares.of_sequences if objective.sequence_level else shares.of_tokens
    ratio, limit = facts.ratio, objective.max_log_ratio
    metrics = {
        "clip_fraction/tokens": share(facts.clip.cut, shares.of_tokens),
        "clip_fraction/sequences": share(facts.sequence_cut, shares.of_sequences),
        "clip_fraction/lower": share(facts.clip.lower, shares.of_tokens),
        "clip_fraction/upper": share(facts.clip.upper, shares.of_tokens),
        "ratio/mean": share(ratio, unit),
        # About 1, not about the mean: additive, and GSPO's spread of 1e-4 survives float32.
        "ratio/square_deviation": share((ratio - 1).square(), unit),
        "ratio_max": _extreme(ratio, mask, torch.amax, -math.inf),
        "ratio_min": _extreme(ratio, mask, torch.amin, math.inf),
        "log_ratio_clamped": share(facts.clamped, unit),
        # log_ratio is log(current / old) on samples of the old policy: this estimates KL(old || current).
        "kl/old_policy": share(k3(log_ratio.clamp(-limit, limit)), shares.of_tokens),
    }
    if objective.dual_clip is not None:
        metrics["clip_fraction/dual"] = share(facts.clip.dual, shares.of_tokens)
    return metrics


def no_ratio_metrics(shares: Shares) -> dict[str, Tensor]:
    """The clip fractions of an objective without a ratio: 0."""
    zero = shares.of_tokens.new_zeros(())
    return {f"clip_fraction/{what}": zero for what in ("tokens", "sequences", "lower", "upper")}


def finish_metrics(summed: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Final figures from shares that were added up over all micro-batches and ranks.

    Args:
        summed: name (as `policy_loss` gave it) -> the sum of shares; for names ending in `_max` / `_min` the
            largest / smallest.

    Returns:
        the same, as floats (this waits for the device), with `ratio/square_deviation` replaced by `ratio/std`
        and `effective_sample_size`: (sum w)^2 / sum w^2 / n, in (0, 1], w the importance ratio and n their
        number. Extremes over nothing (+-inf) are left out.
    """
    final = {name: float(value) for name, value in summed.items()}
    final = {n: v for n, v in final.items() if not (n.endswith(("_max", "_min")) and math.isinf(v))}
    if "ratio/square_deviation" in final:
        deviation, mean = final.pop("ratio/square_deviation"), final["ratio/mean"]
        final["ratio/std"] = math.sqrt(max(deviation - (mean - 1) ** 2, 0.0))
        mean_square = deviation + 2 * mean - 1
        final["effective_sample_size"] = min(mean**2 / mean_square, 1.0) if mean_square > 0 else 0.0
    return final
