"""Ratios at the limit of the log-ratio, by hand: a value on the limit is not clamped."""

import math

import pytest
import torch

from megatron_gspo.algorithms.ratio import sequence_ratio, token_ratio


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
