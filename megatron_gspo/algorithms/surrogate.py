"""Surrogate objectives of an importance ratio and an advantage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .objective import Objective


@dataclass(frozen=True)
class Clip:
    """The tokens whose gradient the clip removes, all [T] bool.

    `lower`: A < 0 and ratio < 1 - epsilon_low. `upper`: A > 0 and ratio > 1 + epsilon_high. `cut`: either.
    `dual`: A < 0 and ratio > dual_clip; None without a dual clip.
    """

    lower: Tensor
    upper: Tensor
    cut: Tensor
    dual: Tensor | None


def clipped_surrogate(objective: Objective, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Clip]:
    """`min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)`: to be maximised, all [T].

    Written as a choice instead of a min: where the clip binds the value is a constant times A, elsewhere
    ratio * A. That is the same number and gradient, and the clip metrics always agree with it.
    With `dual_clip` c the value is max(that, c * A) where A < 0 (arXiv:1912.09729, eq. 5).
    """
    with torch.no_grad():
        low, high = objective.clip_range
        lower = (advantages < 0) & (ratio < low)
        upper = (advantages > 0) & (ratio > high)
        cut, bound = lower | upper, ratio.clamp(low, high)
        clip = Clip(lower, upper, cut, None)
        if objective.dual_clip is not None:
            dual = (advantages < 0) & (ratio > objective.dual_clip)
            bound = torch.where(dual, objective.dual_clip, bound)
            clip, cut = replace(clip, dual=dual), cut | dual
    return torch.where(cut, bound, ratio) * advantages, clip
