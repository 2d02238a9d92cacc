"""One advantage for each response of a rollout batch: of its group, or by a function of the
user's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import Objective
from megatron_gspo.user_code import UserCodeError, call_for_trial, load_user_function

from .advantages import group_advantages

_KEY = "algorithm.advantage_estimator"


@dataclass(frozen=True)
class ResponseTerms:
    """What an advantage estimator reads: the responses of a rollout batch that have a reward, on
    the host and the same on every rank.
    """

    rewards: Tensor
    """[N] float64, finite, less the penalties of the config (length, KL)."""
    group_ids: Tensor
    """[N] int64; responses to the same prompt share one."""
    lengths: Tensor
    """[N] int64, tokens of the response."""
    truncated: Tensor
    """[N] bool, whether the response ended at the length limit."""


def response_advantages(objective: Objective, terms: ResponseTerms) -> Tensor:
    """The advantages [N] float32 of the objective's estimator, which is not `gae`.

    Raises UserCodeError where a function of the user's can't be loaded, or returns anything else.
    """
    if not objective.has_own_advantages:
        return group_advantages(
            terms.rewards,
            terms.group_ids,
            std=objective.advantage_std,
            baseline=objective.advantage_baseline,
        )
    given = objective.advantage_estimator
    function = load_user_function(_KEY, given) if isinstance(given, str) else given
    values = function(objective, terms, **objective.advantage_options)
    count = len(terms.rewards)
    if not isinstance(values, Tensor) or values.shape != terms.rewards.shape:
        shown = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserCodeError(
            f"{_KEY} = {given!r}: returned {shown} for {count} responses; return a tensor [N]"
        )
    if not values.isfinite().all():
        raise UserCodeError(
            f"{_KEY} = {given!r}: returned NaN or infinity for finite rewards; correct the formula"
        )
    return values.detach().float()


def check_advantages(objective: Objective) -> None:
    """Try an objective's own estimator with two groups, one of equal rewards.

    Raises UserCodeError where it can't be loaded, raises, or returns anything else.
    """
    if not objective.has_own_advantages:
        return
    terms = ResponseTerms(
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([5, 3, 4, 4]),
        truncated=torch.tensor([False, True, False, False]),
    )
    arguments = ", ".join(["objective", "terms", *objective.advantage_options])
    call_for_trial(
        _KEY,
        objective.advantage_estimator,
        f"({arguments}) of 4 responses",
        lambda: response_advantages(objective, terms),
    )
