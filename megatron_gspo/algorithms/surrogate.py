"""Surrogate objectives: what a token contributes to the objective, given its ratio and advantage.

A surrogate is a function of an objective and the tokens of a micro-batch. It returns what is to be
maximised, and which tokens it clips. Those of `SURROGATES` have a name; `Objective.surrogate` may
be a function of the same signature, or name one in a user's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import Objective
from megatron_gspo.user_code import UserCodeError, call_for_trial, load_user_function

from .kl import binary_kl
from .segments import Segments
from .token_terms import TokenTerms

_KEY = "algorithm.surrogate"


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
    dual: Tensor | None = None


SurrogateFunction: TypeAlias = Callable[..., Tensor | tuple[Tensor, Clip]]
"""`surrogate(objective, terms, **options)`: what is to be maximised, [T], with gradient; a function
of the user's may leave out the clip. options: `objective.surrogate_options`.
"""


def clipped_surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """`min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)`.

    Written as a choice instead of a min: where the clip binds the value is a constant times A,
    elsewhere ratio * A. That is the same number and gradient, and the clip metrics always agree
    with it. With `dual_clip` c the value is max(that, c * A) where A < 0 (arXiv:1912.09729, eq. 5).
    """
    ratio = terms.ratio
    advantages = terms.advantages
    with torch.no_grad():
        clip = _outside(objective, terms)
        cut = clip.cut
        bound = ratio.clamp(*objective.clip_range)
        if objective.dual_clip is not None:
            dual = (advantages < 0) & (ratio > objective.dual_clip)
            bound = torch.where(dual, objective.dual_clip, bound)
            clip = replace(clip, dual=dual)
            cut = cut | dual
    return torch.where(cut, bound, ratio) * advantages, clip


def _outside(objective: Objective, terms: TokenTerms) -> Clip:
    """The tokens whose ratio has left the clip range in the direction of their advantage."""
    low, high = objective.clip_range
    lower = (terms.advantages < 0) & (terms.ratio < low)
    upper = (terms.advantages > 0) & (terms.ratio > high)
    return Clip(lower, lower | upper)


def cispo_surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """`sg[clip(ratio, min_weight, max_weight)] * A * log_probs` (arXiv:2506.13585, eq. 4 and 5).

    Every token keeps a gradient. The published form has no lower bound.
    """
    with torch.no_grad():
        low = objective.min_weight or 0.0
        high = objective.number("max_weight")
        counts = terms.advantages != 0
        lower = counts & (terms.ratio < low)
        upper = counts & (terms.ratio > high)
        weight = terms.ratio.clamp(low, high)
    return weight * terms.advantages * terms.log_probs, Clip(lower, lower | upper)


def sapo_surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """`4 / tau * sigmoid(tau * (ratio - 1)) * A` with tau_pos where A > 0, else tau_neg
    (arXiv:2511.20347).

    Value 2 / tau * A and slope A at a ratio of 1; the slope falls smoothly on both sides.
    """
    positive = objective.number("tau_pos")
    negative = objective.number("tau_neg")
    tau = torch.full_like(terms.ratio, negative).masked_fill(terms.advantages > 0, positive)
    value = torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau) * terms.advantages
    return value, _clips_nothing(terms)


def dppo_surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """`M * sg[min(ratio, max_weight)] * A * log_probs` (arXiv:2602.04879).

    M is 0 where the probability of the token has moved in the direction of A by more than
    `divergence_threshold`: `dppo_tv` measures the difference of the probabilities, `dppo_kl` KL(old
    || current) of "this token or another".
    """
    with torch.no_grad():
        if objective.surrogate == "dppo_kl":
            moved = binary_kl(terms.old_log_probs, terms.log_probs)
        else:
            moved = (terms.log_probs.exp() - terms.old_log_probs.exp()).abs()
        beyond = moved > objective.number("divergence_threshold")
        upper = beyond & (terms.advantages > 0) & (terms.log_ratio > 0)
        lower = beyond & (terms.advantages < 0) & (terms.log_ratio < 0)
        cut = upper | lower
        weight = terms.ratio.clamp(max=objective.number("max_weight")).masked_fill(cut, 0)
    return weight * terms.advantages * terms.log_probs, Clip(lower, cut)


def minirl_surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """`M * sg[min(current / rollout engine, max_weight)] * A * log_probs` (arXiv:2512.01374, eq.
    7).

    M is 0 where `clipped_surrogate` clips the ratio to the old policy.
    """
    assert terms.rollout_log_probs is not None
    with torch.no_grad():
        clip = _outside(objective, terms)
        largest = math.log(objective.number("max_weight"))
        weight = (terms.log_probs - terms.rollout_log_probs).clamp(max=largest).exp()
        weight = weight.masked_fill(clip.cut, 0)
    return weight * terms.advantages * terms.log_probs, clip


SURROGATES: dict[str, Callable[[Objective, TokenTerms], tuple[Tensor, Clip]]] = {
    "clip": clipped_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "dppo_tv": dppo_surrogate,
    "dppo_kl": dppo_surrogate,
    "minirl": minirl_surrogate,
}


def surrogate(objective: Objective, terms: TokenTerms) -> tuple[Tensor, Clip]:
    """What is to be maximised for each token, [T], and which tokens are clipped.

    Raises UserCodeError where a function of the user's can't be loaded, or returns anything else.
    """
    if not objective.has_own_surrogate:
        assert isinstance(objective.surrogate, str)
        return SURROGATES[objective.surrogate](objective, terms)
    given = objective.surrogate
    function: SurrogateFunction = (
        load_user_function(_KEY, given) if isinstance(given, str) else given
    )
    returned = function(objective, terms, **objective.surrogate_options)
    value, clip = returned if isinstance(returned, tuple) else (returned, _clips_nothing(terms))
    if not isinstance(value, Tensor) or value.shape != terms.ratio.shape:
        shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserCodeError(
            f"{_KEY} = {objective.surrogate!r}: returned {shown} for {len(terms.ratio)} tokens;"
            " return what is to be maximised, a tensor [T], alone or with a Clip"
        )
    return value, clip


def check_surrogate(objective: Objective) -> None:
    """Try an objective's own surrogate with two responses of two tokens.

    Raises UserCodeError where it can't be loaded, raises, or has no finite gradient.
    """
    if not objective.has_own_surrogate:
        return
    log_probs = torch.tensor([-1.0, -2.0, -1.5, -0.5], requires_grad=True)
    old_log_probs = torch.tensor([-1.1, -1.9, -1.5, -0.7])
    log_ratio = log_probs - old_log_probs
    terms = TokenTerms(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        rollout_log_probs=old_log_probs,
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        segments=Segments(torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 2),
    )

    def value_and_gradient() -> tuple[Tensor, Tensor]:
        value, _ = surrogate(objective, terms)
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        return value, gradient

    arguments = ", ".join(["objective", "terms", *objective.surrogate_options])
    value, gradient = call_for_trial(
        _KEY, objective.surrogate, f"({arguments}) of 4 tokens", value_and_gradient
    )
    if not (value.isfinite().all() and gradient.isfinite().all()):
        raise UserCodeError(
            f"{_KEY} = {objective.surrogate!r}: its value or gradient is not finite at log-ratios"
            " within 0.2; correct the formula"
        )


def _clips_nothing(terms: TokenTerms) -> Clip:
    none = torch.zeros_like(terms.ratio, dtype=torch.bool)
    return Clip(none, none)
