"""Surrogate objectives of an importance ratio and an advantage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kl import binary_kl
from .objective import Objective, SurrogateType


@dataclass(frozen=True)
class Clip:
    """The tokens that the surrogate clips, all [T] bool.

    `cut`: on either side; `lower`: of these, those on the lower side. `clip`: tokens without
    gradient, A < 0 and ratio < 1 - epsilon_low (lower), A > 0 and ratio > 1 + epsilon_high; `dual`:
    A < 0 and ratio > dual_clip, None without a dual clip. `cispo`: those whose weight is raised
    (lower) or truncated. `dppo_tv`, `dppo_kl`, `minirl`: those without gradient, A < 0 (lower) or A
    > 0. `sapo`: none.
    """

    lower: Tensor
    cut: Tensor
    dual: Tensor | None


def clipped_surrogate(
    objective: Objective, ratio: Tensor, advantages: Tensor, *_: Tensor
) -> tuple[Tensor, Clip]:
    """`min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)`: to be maximised, all
    [T].

    Written as a choice instead of a min: where the clip binds the value is a constant times A,
    elsewhere ratio * A. That is the same number and gradient, and the clip metrics always agree
    with it. With `dual_clip` c the value is max(that, c * A) where A < 0 (arXiv:1912.09729, eq. 5).
    """
    with torch.no_grad():
        clip = _outside(objective, ratio, advantages)
        cut, bound = clip.cut, ratio.clamp(*objective.clip_range)
        if objective.dual_clip is not None:
            dual = (advantages < 0) & (ratio > objective.dual_clip)
            bound = torch.where(dual, objective.dual_clip, bound)
            clip, cut = replace(clip, dual=dual), cut | dual
    return torch.where(cut, bound, ratio) * advantages, clip


def _outside(objective: Objective, ratio: Tensor, advantages: Tensor) -> Clip:
    """The tokens whose ratio has left the clip range in the direction of their advantage."""
    low, high = objective.clip_range
    lower = (advantages < 0) & (ratio < low)
    upper = (advantages > 0) & (ratio > high)
    return Clip(lower, lower | upper, None)


def cispo_surrogate(
    objective: Objective,
    ratio: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    log_probs: Tensor,
    *_: Tensor,
) -> tuple[Tensor, Clip]:
    """`sg[clip(ratio, min_weight, max_weight)] * A * log_probs` (arXiv:2506.13585, eq. 4 and 5),
    all [T].

    Every token keeps a gradient. The published form has no lower bound.
    """
    with torch.no_grad():
        low, high = objective.min_weight or 0.0, objective.number("max_weight")
        counts = advantages != 0
        lower, upper = counts & (ratio < low), counts & (ratio > high)
        weight = ratio.clamp(low, high)
    return weight * advantages * log_probs, Clip(lower, lower | upper, None)


def sapo_surrogate(
    objective: Objective, ratio: Tensor, advantages: Tensor, *_: Tensor
) -> tuple[Tensor, Clip]:
    """`4 / tau * sigmoid(tau * (ratio - 1)) * A` with tau_pos where A > 0, else tau_neg
    (arXiv:2511.20347), all [T].

    Value 2 / tau * A and slope A at a ratio of 1; the slope falls smoothly on both sides.
    """
    positive, negative = objective.number("tau_pos"), objective.number("tau_neg")
    tau = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages, Clip(none, none, None)


def dppo_surrogate(
    objective: Objective,
    ratio: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    log_probs: Tensor,
    *_: Tensor,
) -> tuple[Tensor, Clip]:
    """`M * sg[min(ratio, max_weight)] * A * log_probs` (arXiv:2602.04879), all [T].

    M is 0 where the probability of the token has moved in the direction of A by more than
    `divergence_threshold`: `dppo_tv` measures the difference of the probabilities, `dppo_kl` KL(old
    || current) of "this token or another".
    """
    with torch.no_grad():
        old_log_probs = log_probs - log_ratio
        if objective.surrogate == "dppo_kl":
            moved = binary_kl(old_log_probs, log_probs)
        else:
            moved = (log_probs.exp() - old_log_probs.exp()).abs()
        beyond = moved > objective.number("divergence_threshold")
        upper = beyond & (advantages > 0) & (log_ratio > 0)
        lower = beyond & (advantages < 0) & (log_ratio < 0)
        cut = upper | lower
        weight = ratio.clamp(max=objective.number("max_weight")).masked_fill(cut, 0)
    return weight * advantages * log_probs, Clip(lower, cut, None)


def minirl_surrogate(
    objective: Objective,
    ratio: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
) -> tuple[Tensor, Clip]:
    """`M * sg[min(current / rollout engine, max_weight)] * A * log_probs` (arXiv:2512.01374, eq.
    7), all [T].

    M is 0 where `clipped_surrogate` clips the ratio to the old policy.
    """
    with torch.no_grad():
        clip = _outside(objective, ratio, advantages)
        largest = math.log(objective.number("max_weight"))
        weight = (log_probs - rollout_log_probs).clamp(max=largest).exp().masked_fill(clip.cut, 0)
    return weight * advantages * log_probs, clip


# surrogate(objective, ratio, advantages, log_ratio, log_probs, rollout_log_probs) -> (value to be
# maximised [T], what it clips). log_probs is only there where `objective.weighs_log_probs`,
# rollout_log_probs where it needs them.
SURROGATES: dict[SurrogateType, Callable[..., tuple[Tensor, Clip]]] = {
    "clip": clipped_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "dppo_tv": dppo_surrogate,
    "dppo_kl": dppo_surrogate,
    "minirl": minirl_surrogate,
}
