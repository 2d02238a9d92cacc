"""Advantages of turns: by hand, against a naive loop, and where they must equal group
advantages.
"""

import math

import pytest
import torch

from megatron_gspo.algorithms import group_advantages, turn_advantages, turn_returns

# Three episodes of one group: wrong then right; right at once; wrong twice.
REWARDS = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
EPISODES = torch.tensor([4, 4, 7, 2, 2])
GROUP = torch.full((5,), 9)


def test_returns_by_hand():
    assert turn_returns(REWARDS, EPISODES, 0.5).tolist() == [0.5, 1, 1, 0, 0]
    assert turn_returns(REWARDS, EPISODES, 1.0).tolist() == [1, 1, 1, 0, 0]
    assert turn_returns(REWARDS, EPISODES, 0.0).tolist() == REWARDS.tolist()
    three = torch.tensor([1.0, 2.0, 4.0])
    # 1 + 2/2 + 4/4.
    assert turn_returns(three, torch.zeros(3, dtype=torch.long), 0.5).tolist() == [3, 4, 4]
    # the same id again is another episode's turn only where it stands apart
    assert turn_returns(three, torch.tensor([0, 1, 0]), 1.0).tolist() == [1, 2, 4]


def test_advantages_by_hand():
    """First turns: returns 1/2, 1, 0, mean 1/2, sample std 1/2.

    Second turns: 1, 0, mean 1/2, std sqrt(1/2).
    """
    got = turn_advantages(REWARDS, EPISODES, GROUP, discount=0.5)
    second = math.sqrt(0.5)
    torch.testing.assert_close(got, torch.tensor([0, second, 1, -1, -second]))
    got = turn_advantages(
        REWARDS, EPISODES, GROUP, discount=0.5, std="none", baseline="leave_one_out"
    )
    torch.testing.assert_close(got, torch.tensor([0, 1, 0.75, -0.75, -1]))


def random_episodes(seed: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, longest + 1, (24,), generator=g)
    episodes = torch.repeat_interleave(torch.randperm(100, generator=g)[:24], counts)
    groups = torch.repeat_interleave(torch.randint(0, 5, (24,), generator=g), counts)
    return (
        torch.randn(len(episodes), generator=g, dtype=torch.float64).round(decimals=1),
        episodes,
        groups,
    )


def naive(rewards, episodes, groups, discount, std):
    """Loops over episodes in Python floats."""
    turns_of_episode: dict[int, list[int]] = {}
    for turn, episode in enumerate(episodes):
        turns_of_episode.setdefault(episode, []).append(turn)
    returns = [0.0] * len(rewards)
    for turns in turns_of_episode.values():
        for k, turn in enumerate(turns):
            returns[turn] = sum(discount**j * rewards[later] for j, later in enumerate(turns[k:]))
    values = [0.0] * len(rewards)
    for turns in turns_of_episode.values():
        for k, turn in enumerate(turns):
            peers = [
                returns[other[k]]
                for other in turns_of_episode.values()
                if len(other) > k and groups[other[k]] == groups[turn]
            ]
            mean = sum(peers) / len(peers)
            if max(peers) > min(peers):
                freedom = len(peers) - (1 if std == "sample" else 0)
                values[turn] = (returns[turn] - mean) / math.sqrt(
                    sum((x - mean) ** 2 for x in peers) / freedom
                )
    return values


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9])
def test_against_a_naive_loop(seed, std, discount):
    rewards, episodes, groups = random_episodes(seed, 4)
    wanted = naive(rewards.tolist(), episodes.tolist(), groups.tolist(), discount, std)
    got = turn_advantages(rewards, episodes, groups, discount=discount, std=std)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert len(set(wanted)) > 20


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_one_turn_is_a_group_advantage(std, baseline):
    rewards, episodes, groups = random_episodes(1, 1)
    wanted = group_advantages(rewards, groups, std=std, baseline=baseline)
    for discount in (0.0, 0.3, 1.0):
        got = turn_advantages(
            rewards, episodes, groups, discount=discount, std=std, baseline=baseline
        )
        assert torch.equal(got, wanted)


def test_refusals_and_nothing():
    none = torch.zeros(0, dtype=torch.long)
    assert turn_advantages(torch.zeros(0), none, none).shape == (0,)
    for discount in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="must be 0 .* to 1"):
            turn_advantages(REWARDS, EPISODES, GROUP, discount=discount)
    with pytest.raises(ValueError, match="NaN or infinity"):
        turn_advantages(REWARDS / 0, EPISODES, GROUP)
    with pytest.raises(ValueError, match="must be integers"):
        turn_advantages(REWARDS, REWARDS, GROUP)
