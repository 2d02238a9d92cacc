"""Advantages of responses and turns, by hand."""

from __future__ import annotations

import numpy as np

from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.loop.advantages import with_turn_advantages
from tests.loop.episodes import episode


def test_penalties_are_charged_to_the_last_turn():
    samples = [episode(0.0, 1.0), episode(1.0, 0.0), episode(0.5, 0.0, reward=float("nan"))]
    shaped = np.array([1.0, 0.0, np.nan])  # one off the second
    algorithm = AlgorithmConfig.preset(name="gspo_token", turn_discount=0.5, advantage_std="none")
    samples = with_turn_advantages(samples, shaped, algorithm)
    # returns 1/2, 1 and 1 - 1/2, -1
    np.testing.assert_allclose(samples[0].advantages, [0, 0, 0, 1, 1])
    np.testing.assert_allclose(samples[1].advantages, [0, 0, 0, -1, -1])
    assert samples[2].advantages.tolist() == [0] * 5 and samples[2].advantages.dtype == np.float32
