"""Rewards of samples: of the verifier's share on each rank, and of episodes."""

from __future__ import annotations

import numpy as np

from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import score_episodes
from megatron_gspo.rewards.scorer import FAILURE
from tests.loop.episodes import episode


def test_a_failure_is_worth_what_the_config_says():
    failed = episode(0.5, 0.25, reward=float("nan"))
    failed.metadata[FAILURE] = "timeout: no result"
    fine = episode(1.0)
    (first, second), failures = score_episodes([failed, fine], None)
    assert failures == {"timeout": 1} and first is failed and second is fine
    (first, second), failures = score_episodes([failed, fine], -2.0)
    assert failures == {"timeout": 1} and second is fine and np.isnan(failed.reward)
    assert first.reward == -2.0 and [span.reward for span in spans(first)] == [0.0, -2.0]
