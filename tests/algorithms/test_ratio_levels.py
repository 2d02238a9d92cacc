"""Each ratio level by hand: two sequences of 2 and 1 trained tokens, one position untrained."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from megatron_gspo.algorithms import Segments, preset
from megatron_gspo.algorithms.objective import ImportanceSamplingLevel
from megatron_gspo.algorithms.ratio_levels import RATIO_LEVELS, sequence_level, token_level, without_ratio

MASK = torch.tensor([True, True, True, False])
IDS = torch.tensor([0, 0, 1, 1])
LOG_RATIO = torch.log(torch.tensor([2.0, 0.5, 1.1, 1.0], dtype=torch.float64))
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.float64)


def segments(sum_over_context=None):
    return Segments(MASK, IDS, 2, sum_over_context)


def test_every_level_has_a_function():
    assert set(RATIO_LEVELS) == set(get_args(ImportanceSamplingLevel))
    assert RATIO_LEVELS["sequence"] is RATIO_LEVELS["sequence_token"] is sequence_level
    assert (RATIO_LEVELS["token"], RATIO_LEVELS["none"]) == (token_level, without_ratio)


def test_token_level():
    objective = preset("grpo", epsilon_low=0.2, epsilon_high=0.3)
    surrogate, lengths, stats = token_level(objective, LOG_RATIO, ADVANTAGES, segments())
    assert surrogate.tolist() == pytest.approx([1.3, 0.5, -1.1, 0.0]) and lengths.tolist() == [2, 1]
    assert stats.ratio.tolist() == pytest.approx([2, 0.5, 1.1, 1]) and torch.equal(stats.counts, MASK)
    assert stats.clip.cut.tolist() == [True, False, False, False] and not stats.clip.lower.any()
    assert stats.clipped.tolist() == [1, 0]
    assert stats.in_clipped_sequences.tolist() == [2, 0]  # both tokens stand for the clipped sequence
    assert not stats.clamped.any() and stats.log_ratio is LOG_RATIO


def test_geometric_mean_clips_beyond_its_bounds_only():
    """Log-ratios on the bounds, beyond them, and of advantage 0."""
    objective = preset("gmpo", epsilon_low=0.25, epsilon_high=0.5)
    log_ratio = torch.tensor([0.5, 0.75, -0.25, -0.5, 0.75, -0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    one = Segments(torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    _, _, stats = RATIO_LEVELS["geometric_mean"](objective, log_ratio, advantages, one)
    assert stats.clip.cut.tolist() == [False, True, False, True, False, False]
    assert stats.clip.lower.tolist() == [False, False, False, True, False, False]
    np.testing.assert_allclose(stats.ratio.log(), [(0.5 + 0.5) / 2, (-0.25 - 0.25) / 2, (0.75 - 0.5) / 2])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric_mean"])
def test_the_off_policy_mask_takes_what_is_beyond_its_threshold(level):
    """Means of -0.5 over one token and over two, and -0.75; one row of sums less without a mask."""
    name = {"token": "grpo", "sequence": "gspo", "geometric_mean": "gmpo"}[level]
    log_ratio = torch.tensor([-0.5, -0.25, -0.75, -0.75], dtype=torch.float64)
    ids, advantages = torch.tensor([0, 1, 1, 2]), -torch.ones(4, dtype=torch.float64)
    rows = []
    one = Segments(torch.ones(4, dtype=torch.bool), ids, 3, lambda x: rows.append(len(x)) or x)
    for threshold, masked in ((0.5, [0, 0, 1]), (0.499, [1, 2, 1]), (None, None)):
        objective = preset(name, off_policy_mask_threshold=threshold)
        _, _, stats = RATIO_LEVELS[level](objective, log_ratio, advantages, one)
        assert masked is None if stats.off_policy is None else stats.off_policy.tolist() == masked
    assert len(rows) == 3  # one sum over the context ranks for each, with a mask too
    assert rows[0] - rows[2] == (level != "sequence")


def test_a_sequence_clipped_on_another_rank_counts_here_with_this_ranks_tokens():
    objective = preset("grpo", epsilon_low=0.2, epsilon_high=0.3)
    other = torch.tensor([[0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)  # one clipped token of sequence 1
    _, lengths, stats = token_level(objective, LOG_RATIO, ADVANTAGES, segments(lambda x: x + other))
    assert lengths.tolist() == [5, 4]
    assert stats.clipped.tolist() == [1, 0] and stats.in_clipped_sequences.tolist() == [2, 1]


def test_sequence_level():
    objective = preset("gspo", epsilon_low=0.05, epsilon_high=0.05)
    log_ratio = LOG_RATIO.clone().requires_grad_()
    surrogate, lengths, stats = sequence_level(objective, log_ratio, ADVANTAGES, segments())
    # sqrt(2 * 0.5) = 1 and 1.1; with A < 0 the upper bound does not clip
    assert surrogate.tolist() == pytest.approx([1, 1, -1.1, 0]) and lengths.tolist() == [2, 1]
    assert stats.ratio.tolist() == pytest.approx([1, 1.1]) and stats.counts.tolist() == [2, 1]
    assert stats.clipped.tolist() == stats.in_clipped_sequences.tolist() == [0, 0]
    surrogate.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([1, 1, -1.1, 0])

    _, _, stats = sequence_level(objective, LOG_RATIO, -ADVANTAGES, segments())
    assert stats.clipped.tolist() == stats.in_clipped_sequences.tolist() == [0, 1]  # A > 0 at 1.1


def test_sequence_level_uses_the_log_ratios_of_all_ranks():
    objective = preset("gspo", epsilon_low=0.05, epsilon_high=0.05)
    other = torch.tensor([[math.log(4.0), 0.0], [2.0, 0.0]], dtype=torch.float64)
    brought = []
    _, lengths, stats = sequence_level(
        objective, LOG_RATIO, ADVANTAGES, segments(lambda x: brought.append(x) or x + other)
    )
    assert len(brought) == 1 and not brought[0].requires_grad
    assert lengths.tolist() == [4, 1]
    assert stats.ratio.tolist() == pytest.approx([4 ** (1 / 4), 1.1])  # (2 * 0.5 * 4)^(1/4)


def test_a_sequence_without_a_trained_token_has_ratio_one():
    objective = preset("gspo", epsilon_low=0.05, epsilon_high=0.05)
    three = Segments(MASK, IDS, 3)
    _, lengths, stats = sequence_level(objective, LOG_RATIO, ADVANTAGES, three)
    assert lengths.tolist() == [2, 1, 0] and stats.ratio[2] == 1 and not stats.ratio.isnan().any()


def test_without_ratio():
    log_probs = torch.tensor([-1.0, -2.0, -3.0, 0.0])
    calls = []
    surrogate, lengths, stats = without_ratio(
        preset("sft"), log_probs, 2 * MASK.float(), segments(lambda x: calls.append(x) or 2 * x)
    )
    assert surrogate.tolist() == [-2, -4, -6, 0] and lengths.tolist() == [4, 2] and stats is None
    assert len(calls) == 1 and calls[0].tolist() == [[2, 1]]


@pytest.mark.parametrize("level", [token_level, sequence_level])
def test_the_limit_of_the_log_ratio(level):
    objective = preset("gspo" if level is sequence_level else "grpo", max_log_ratio=0.09)
    _, _, stats = level(objective, LOG_RATIO, ADVANTAGES, segments())
    assert stats.clamped.tolist() == ([False, True] if level is sequence_level else [True, True, True, False])
    assert stats.ratio.max().item() == pytest.approx(math.exp(0.09))
