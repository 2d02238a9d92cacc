import pytest
import torch

from megatron_gspo.algorithms import group_advantages, overlong_penalty, zero_variance_groups


def test_zero_variance_groups():
    rewards = torch.tensor([0.1, 1, 0.1, 0, 0.1, 5], dtype=torch.float64)
    ids = torch.tensor([7, 3, 7, 3, 7, 9])
    equal = zero_variance_groups(rewards, ids)  # group 7, and group 9 of one response
    assert equal.tolist() == [True, False, True, False, True, True]
    assert torch.equal(group_advantages(rewards, ids) == 0, equal)
    nothing = zero_variance_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert (nothing.shape, nothing.dtype) == ((0,), torch.bool)


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
