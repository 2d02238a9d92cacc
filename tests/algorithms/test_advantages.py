import pytest
import torch

from megatron_gspo.algorithms import group_advantages


def test_sample_std_worked_case_is_the_default():
    rewards = torch.tensor([0.8, 0.4, 0.6], dtype=torch.float64)
    got = group_advantages(rewards, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([1.0, -1, 0]), atol=1e-7, rtol=0)
    # sample std of 1, 0, 1, 0 is 1 / sqrt(3)
    got = group_advantages(torch.tensor([1.0, 0, 1, 0]), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([1.0, -1, 1, -1]) * 3**0.5 / 2)


def test_groups_of_two_by_hand():
    # Integers are rewards too.
    rewards = torch.tensor([1, 0, 5, 1])
    ids = torch.tensor([0, 0, 1, 1])
    # sample std: 1 / sqrt(2) and 4 / sqrt(2), n - 1 = 1
    half = 0.5**0.5
    torch.testing.assert_close(
        group_advantages(rewards, ids), torch.tensor([half, -half, half, -half])
    )
    assert group_advantages(rewards, ids, std="population").tolist() == [1, -1, 1, -1]
    # the others' mean is the other one
    got = group_advantages(rewards, ids, std="none", baseline="leave_one_out")
    assert got.tolist() == [1, -1, 4, -4]
    assert group_advantages([1, 0], [3, 3], std="none").tolist() == [0.5, -0.5]  # lists as well


def test_std_off_and_leave_one_out_by_hand():
    rewards = torch.tensor([3.0, 0, 0])
    ids = torch.zeros(3, dtype=torch.long)
    assert group_advantages(rewards, ids, std="none").tolist() == [2, -1, -1]
    # others' means: 0, 1.5, 1.5
    assert group_advantages(rewards, ids, std="none", baseline="leave_one_out").tolist() == [
        3,
        -1.5,
        -1.5,
    ]
    both = group_advantages(rewards, ids, std="sample", baseline="leave_one_out")
    torch.testing.assert_close(both, torch.tensor([3.0, -1.5, -1.5]) / 3**0.5)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_against_a_loop_with_scattered_group_ids(std, baseline):
    g = torch.Generator().manual_seed(3)
    ids = torch.tensor([70, -4, 9, 12345])[torch.randint(0, 4, (60,), generator=g)]
    rewards = torch.randn(60, generator=g)
    got = group_advantages(rewards, ids, std=std, baseline=baseline)
    for i in range(60):
        group = [float(rewards[j]) for j in range(60) if ids[j] == ids[i]]
        others = [float(rewards[j]) for j in range(60) if ids[j] == ids[i] and j != i]
        mean = sum(group) / len(group)
        base = mean if baseline == "mean" else sum(others) / len(others)
        spread = sum((r - mean) ** 2 for r in group)
        scale = {
            "sample": (spread / (len(group) - 1)) ** 0.5,
            "population": (spread / len(group)) ** 0.5,
        }
        assert got[i].item() == pytest.approx(
            (float(rewards[i]) - base) / scale.get(std, 1.0), abs=1e-6
        )


@pytest.mark.parametrize("value", [0.1, 0.7, 1e8])
@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(value, std, baseline):
    # three times 0.1 has a mean that is not 0.1: dividing that error by its own std would give +-1
    rewards = torch.tensor([value] * 3 + [1.0, 0.0], dtype=torch.float64)
    got = group_advantages(rewards, torch.tensor([5, 5, 5, 6, 6]), std=std, baseline=baseline)
    assert got[:3].tolist() == [0, 0, 0]
    assert got[3] > 0 > got[4]


def test_group_of_one_gives_zero_and_leaves_the_others_alone():
    for std in ("sample", "population", "none"):
        for baseline in ("mean", "leave_one_out"):
            got = group_advantages(
                torch.tensor([7.0, 1, 3]), torch.tensor([1, 0, 0]), std=std, baseline=baseline
            )
            assert got[0] == 0 and torch.isfinite(got).all() and got[1] == -got[2] != 0


def test_large_offset_keeps_its_digits():
    # float32 would lose the difference in the mean of 1e6
    rewards = torch.tensor([1e6 + 0.25, 1e6 - 0.25], dtype=torch.float64)
    got = group_advantages(rewards, torch.zeros(2, dtype=torch.long), std="population")
    assert got.tolist() == [1, -1]
    # and so it would in the mean of three float32 rewards: 1000000.0833 is no float32
    got = group_advantages(
        torch.tensor([1e6 + 0.25, 1e6 - 0.25, 1e6 + 0.25]), torch.zeros(3).long(), std="none"
    )
    assert got.tolist() == pytest.approx([1 / 6, -1 / 3, 1 / 6], rel=1e-6)


def test_empty():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
