import math

import pytest
import torch

from megatron_gspo.algorithms import (
    complete_responses,
    finite_log_probs,
    finite_rewards,
    group_advantages,
    overlong_penalty,
    zero_variance_groups,
)


def test_zero_variance_groups():
    rewards = torch.tensor([0.1, 1, 0.1, 0, 0.1, 5], dtype=torch.float64)
    ids = torch.tensor([7, 3, 7, 3, 7, 9])
    keep, dropped, total = zero_variance_groups(rewards, ids)
    assert keep.tolist() == [False, True, False, True, False, False]
    assert (dropped, total) == (2, 3)  # group 7, and group 9 of one response
    assert torch.equal(group_advantages(rewards, ids) != 0, keep)
    nothing = zero_variance_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert (nothing.keep.shape, nothing.keep.dtype, nothing.dropped, nothing.total) == (
        (0,),
        torch.bool,
        0,
        0,
    )


def test_finite_rewards():
    keep, dropped, total = finite_rewards(torch.tensor([1.0, math.nan, math.inf, 0, -math.inf]))
    assert keep.tolist() == [True, False, False, True, False] and (dropped, total) == (3, 5)


def test_finite_log_probs_looks_at_trained_tokens_only():
    log_probs = torch.tensor([math.nan, -1, -1, -math.inf, math.nan, -2])
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0])
    keep, dropped, total = finite_log_probs(log_probs, mask, torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    assert keep.tolist() == [True, False, True] and (dropped, total) == (1, 3)


def test_complete_responses():
    reasons = ["stop", "length", "abort", "stop"]
    assert complete_responses(reasons).keep.tolist() == [True, False, False, True]
    assert complete_responses(reasons, drop=("length",)).keep.tolist() == [True, False, True, True]
    assert complete_responses(reasons).dropped == 2


def test_overlong_penalty_by_hand():
    # free up to 16384 - 4096 = 12288, then linear to -1 at 16384
    lengths = torch.tensor([1, 12288, 13312, 14336, 16384, 20000])
    got = overlong_penalty(lengths, max_length=16384, buffer=4096)
    assert got.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    got = overlong_penalty(lengths, max_length=16384, buffer=4096, factor=0.5)
    assert got.tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]
    for buffer in (0, 16385):
        with pytest.raises(ValueError, match=f"buffer = {buffer}"):
            overlong_penalty(lengths, max_length=16384, buffer=buffer)


def test_no_responses_at_all():
    keep, dropped, total = complete_responses([])
    assert (keep.dtype, keep.shape, dropped, total) == (torch.bool, (0,), 0, 0)
    assert finite_rewards([1.0, math.nan]).keep.tolist() == [True, False]  # a list will do
    assert finite_rewards(torch.zeros(0))[1:] == (0, 0)
