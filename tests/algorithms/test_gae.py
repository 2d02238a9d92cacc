"""Generalised advantage estimation: by hand, against a naive loop, and its ends lam = 0 and 1."""

import pytest
import torch

from megatron_gspo.algorithms import gae_advantages
from megatron_gspo.algorithms.gae import discounted_sums


def naive(rewards, values, gamma, lam):
    """Over the terms of each sum."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def test_by_hand():
    """Deltas 0.5 * 4 - 2 = 0, 1 + 0.5 * 6 - 4 = 0, 8 - 6 = 2; gamma lam = 1/4."""
    rewards = torch.tensor([0.0, 1.0, 8.0])
    values = torch.tensor([2.0, 4.0, 6.0])
    advantages, returns = gae_advantages(rewards, values, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0.125, 0.5, 2.0] and returns.tolist() == [2.125, 4.5, 8.0]
    assert advantages.dtype == returns.dtype == torch.float64


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.0, 1.0), (1.0, 1.0)])
def test_against_a_naive_loop(length, gamma, lam):
    g = torch.Generator().manual_seed(length)
    rewards, values = (torch.randn(length, generator=g, dtype=torch.float64) for _ in range(2))
    advantages, returns = gae_advantages(rewards, values, gamma=gamma, lam=lam)
    expected = torch.tensor(
        naive(rewards.tolist(), values.tolist(), gamma, lam), dtype=torch.float64
    )
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.0, 1.0), (1.0, 1.0)])
def test_trajectories_end_to_end_are_those_alone(gamma, lam):
    lengths = [3, 64, 0, 1, 130, 63, 65]
    g = torch.Generator().manual_seed(0)
    rewards, values = (
        torch.randn(sum(lengths), generator=g, dtype=torch.float64) for _ in range(2)
    )
    together = gae_advantages(rewards, values, gamma=gamma, lam=lam, lengths=lengths)[0]
    pairs = zip(rewards.split(lengths), values.split(lengths), strict=True)
    alone = [naive(r.tolist(), v.tolist(), gamma, lam) for r, v in pairs]
    torch.testing.assert_close(
        together, torch.tensor(sum(alone, []), dtype=torch.float64), rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="lengths add up to 325; there are 326 steps"):
        gae_advantages(rewards, values, lengths=lengths[:-1] + [64])


def test_no_trajectory():
    for lengths in (None, [], [0]):
        advantages, returns = gae_advantages(torch.zeros(0), torch.zeros(0), lengths=lengths)
        assert advantages.tolist() == returns.tolist() == []


def test_sums_stay_exact_over_a_long_response():
    sums = discounted_sums(torch.ones(32_768, dtype=torch.float64), 1.0, torch.tensor([32_768]))
    assert sums.tolist() == list(range(32_768, 0, -1))
    assert discounted_sums(torch.ones(3), 0.5, torch.tensor([3])).tolist() == [1.75, 1.5, 1.0]


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((1, 2), (1, 2)), ((2,), (1, 2))])
def test_shapes_are_checked(shapes):
    rewards, values = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError) as error:
        gae_advantages(rewards, values)
    assert str(error.value) == f"rewards {shapes[0]} and values {shapes[1]}: both must be [n]"
