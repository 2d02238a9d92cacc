"""The clipped surrogate by hand: a ratio on a bound is inside, an advantage of 0 is never
clipped.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import Segments, TokenTerms, preset
from megatron_gspo.algorithms.surrogate import SURROGATES, clipped_surrogate

cispo_surrogate, sapo_surrogate, dppo_surrogate = (
    SURROGATES[name] for name in ("cispo", "sapo", "dppo_tv")
)


def terms(ratio: Tensor, advantages: Tensor, log_probs: Tensor | None = None) -> TokenTerms:
    """Tokens of one response with these ratios. log_probs: -1 where they do not matter."""
    current = -torch.ones_like(ratio) if log_probs is None else log_probs
    log_ratio = ratio.log()
    return TokenTerms(
        log_probs=current,
        old_log_probs=current - log_ratio,
        rollout_log_probs=None,
        log_ratio=log_ratio,
        ratio=ratio,
        advantages=advantages,
        segments=Segments(
            torch.ones(len(ratio), dtype=torch.bool), torch.zeros(len(ratio), dtype=torch.long), 1
        ),
    )


def test_clip_at_its_bounds():
    objective = preset("grpo", epsilon_low=0.25, epsilon_high=0.25, dual_clip=2.0)
    ratio = torch.tensor([0.5, 0.75, 1.25, 1.5, 2.0, 2.5])
    for advantage, lower, upper, dual in (
        (1.0, [], [3, 4, 5], []),
        (-1.0, [0], [], [5]),
        (0.0, [], [], []),
    ):
        value, clip = clipped_surrogate(objective, terms(ratio, torch.full((6,), advantage)))
        masks = clip.lower, clip.cut & ~clip.lower, clip.dual
        clipped = [[i for i, cut in enumerate(mask.tolist()) if cut] for mask in masks]
        assert clipped == [lower, upper, dual]
        assert clip.cut.tolist() == [i in (*lower, *upper) for i in range(6)]
        bound = {i: 0.75 for i in lower} | {i: 1.25 for i in upper} | {i: 2.0 for i in dual}
        assert value.tolist() == [advantage * bound.get(i, ratio[i].item()) for i in range(6)]


def test_a_weight_on_a_bound_is_not_truncated():
    objective = preset("cispo", min_weight=0.5, max_weight=2.0)
    ratio = torch.tensor([0.25, 0.5, 2.0, 4.0, 4.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    value, clip = cispo_surrogate(objective, terms(ratio, advantages))
    assert clip.lower.tolist() == [True, False, False, False, False]
    assert clip.cut.tolist() == [True, False, False, True, False]  # A = 0: not counted
    assert value.tolist() == [-0.5, -0.5, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_probability_on_the_threshold_still_trains(advantage):
    """Probabilities from 1/2 to 1/4, 3/4, 1/2 and 7/8; the total variation is 1/4, 1/4, 0 and
    3/8.
    """
    objective = preset("dppo_tv", divergence_threshold=0.25, max_weight=20.0)
    new = torch.tensor([0.25, 0.75, 0.5, 0.875]).double().log()
    old = torch.full((4,), 0.5).double().log()
    given = replace(
        terms((new - old).exp(), torch.full((4,), advantage).double(), new),
        old_log_probs=old,
        log_ratio=new - old,
    )
    _, clip = dppo_surrogate(objective, given)
    assert clip.cut.tolist() == [False, False, False, advantage > 0] and not clip.lower.any()
    _, clip = dppo_surrogate(preset("dppo_tv", divergence_threshold=0.2), given)
    assert clip.lower.tolist() == [advantage < 0, False, False, False]
    assert clip.cut.tolist() == [advantage < 0, advantage > 0, False, advantage > 0]
