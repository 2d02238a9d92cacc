"""Ratios and the clip at their bounds, by hand: a value on a bound is inside, an advantage of 0 is never clipped."""

import math

import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.algorithms.ratio import clipped_surrogate, sequence_ratio, token_ratio


def test_token_ratio_at_its_limits():
    log_ratio = torch.tensor([-9.0, -2.0, 0.0, 2.0, 9.0], dtype=torch.float64)
    ratio, clamped = token_ratio(log_ratio, 2.0)
    assert ratio.tolist() == pytest.approx([math.exp(-2), math.exp(-2), 1, math.exp(2), math.exp(2)])
    assert clamped.tolist() == [True, False, False, False, True]


def test_sequence_ratio_at_its_limits():
    mean = torch.tensor([-9.0, -2.0, 0.5, 2.0, 9.0], dtype=torch.float64)
    log_probs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    ratio, of_sequence, clamped = sequence_ratio(log_probs, mean, torch.arange(5), 2.0)
    expected = [math.exp(d) for d in (-2, -2, 0.5, 2, 2)]
    assert ratio.tolist() == of_sequence.tolist() == pytest.approx(expected)
    assert clamped.tolist() == [True, False, False, False, True]
    ratio.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([0, *expected[1:4], 0])


def test_clip_at_its_bounds():
    objective = preset("grpo", epsilon_low=0.25, epsilon_high=0.25, dual_clip=2.0)
    ratio = torch.tensor([0.5, 0.75, 1.25, 1.5, 2.0, 2.5])
    for advantage, lower, upper, dual in (
        (1.0, [], [3, 4, 5], []),
        (-1.0, [0], [], [5]),
        (0.0, [], [], []),
    ):
        value, clip = clipped_surrogate(objective, ratio, torch.full((6,), advantage))
        found = [[i for i, cut in enumerate(x.tolist()) if cut] for x in (clip.lower, clip.upper, clip.dual)]
        assert found == [lower, upper, dual]
        assert clip.cut.tolist() == [i in (*lower, *upper) for i in range(6)]
        bound = {i: 0.75 for i in lower} | {i: 1.25 for i in upper} | {i: 2.0 for i in dual}
        assert value.tolist() == [advantage * bound.get(i, ratio[i].item()) for i in range(6)]
