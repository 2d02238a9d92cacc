"""Figures of one policy-loss call, as shares that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .aggregation import Shares, share
from .kl import k3
from .objective import Objective
from .ratio import Clip


@dataclass(frozen=True)
class RatioFacts:
    """What the surrogate saw.

    Attributes:
        log_ratio: [T], of each token.
        ratio: one entry for what one ratio covers: [n] sequences or [T] tokens, by the level; likewise
        clamped: bool, whether its log-ratio was; and
        held: how many trained tokens this rank has of it: a count [n], or the mask [T].
        clip: [T].
        cut: [n], how many tokens of a sequence are clipped here; and
        in_cut_sequences: how many trained tokens here stand for a clipped sequence.
    """

    log_ratio: Tensor
    ratio: Tensor
    clamped: Tensor
    held: Tensor
    clip: Clip
    cut: Tensor
    in_cut_sequences: Tensor


def _extreme(values: Tensor, held: Tensor, reduce: Callable[[Tensor], Tensor], nothing: float) -> Tensor:
    """Largest or smallest of the trained values; `nothing` where there is none, which loses to any other
    rank's.
    """
    if not values.numel():
        return values.new_full((), nothing)
    return reduce(torch.where(held, values, nothing))


@torch.no_grad()
def ratio_metrics(objective: Objective, facts: RatioFacts, shares: Shares) -> dict[str, Tensor]:
    """Clip fractions, moments and extremes of the ratio, KL to the old policy; scalars.

    `ratio/*` and `log_ratio_clamped` count what one ratio covers: sequences or tokens, by the level.
    """
    held, limit, dtype = facts.held != 0, objective.max_log_ratio, facts.ratio.dtype
    unit = facts.held.to(dtype) * shares.of_sequences if objective.sequence_level else shares.of_tokens
    # About 1, not about the mean: additive, and GSPO's spread of 1e-4 survives float32. 0 where nothing is trained.
    deviation = facts.ratio - 1
    cut, lower = facts.cut.sum().to(dtype) * shares.of_tokens, share(facts.clip.lower, shares.of_tokens)
    metrics = {
        "clip_fraction/tokens": cut,
        "clip_fraction/sequences": share(facts.in_cut_sequences.to(dtype), shares.of_sequences),
        "clip_fraction/lower": lower,
        "clip_fraction/upper": cut - lower,
        "ratio/mean": share(held, unit) + share(deviation, unit),
        "ratio/square_deviation": share(deviation.square(), unit),
        "ratio_max": _extreme(facts.ratio, held, torch.amax, -math.inf),
        "ratio_min": _extreme(facts.ratio, held, torch.amin, math.inf),
        "log_ratio_clamped": share(facts.clamped, unit),
        # log_ratio is log(current / old) on samples of the old policy: this estimates KL(old || current).
        "kl/old_policy": share(k3(facts.log_ratio.clamp(-limit, limit)), shares.of_tokens),
    }
    if facts.clip.dual is not None:
        metrics["clip_fraction/dual"] = share(facts.clip.dual, shares.of_tokens)
    return metrics


def no_ratio_metrics(shares: Shares) -> dict[str, Tensor]:
    """The clip fractions of an objective without a ratio: 0."""
    zero = torch.zeros_like(shares.of_tokens)
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
