from itertools import combinations

import numpy as np
import pytest

from megatron_gspo.rollout.pass_at_k import mean_at_k, pass_at_k

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]


def test_by_hand():
    assert mean_at_k(REWARDS) == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert mean_at_k(REWARDS, 1) == pytest.approx(1 / 3)
    # k=2 of 4: 2 successes miss with C(2,2)/C(4,2) = 1/6, one success with C(3,2)/6 = 1/2
    assert pass_at_k(REWARDS, 2) == pytest.approx((5 / 6 + 0 + 1 / 2) / 3)
    assert pass_at_k(REWARDS, 1) == pytest.approx(mean_at_k(REWARDS))
    assert pass_at_k(REWARDS, 4) == pytest.approx(2 / 3)


def test_pass_at_k_equals_the_mean_over_all_subsets():
    rewards = (np.random.default_rng(0).random((20, 7)) < 0.3).astype(float)
    for k in range(1, 8):
        naive = [any(row[list(c)]) for row in rewards for c in combinations(range(7), k)]
        assert pass_at_k(rewards, k) == pytest.approx(np.mean(naive), abs=1e-12)


@pytest.mark.parametrize(
    "rewards, k, message",
    [
        ([1.0, 0.0], 1, "shape .2.: give"),
        (np.zeros((0, 4)), 1, "shape .0, 4.: give"),
        ([[1.0], [float("nan")]], 1, "prompt 1 has a non-finite reward"),
        ([[1.0, 0.0]], 3, "k=3: use 1 to 2"),
        ([[1.0, 0.0]], 0, "k=0: use 1 to 2"),
    ],
)
def test_what_has_no_answer_is_refused(rewards, k, message):
    for metric in (mean_at_k, pass_at_k):
        with pytest.raises(ValueError, match=message):
            metric(rewards, k)
