from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.routing_replay.statistics import RoutingStats
from megatron_gspo.routing_replay.step_metrics import StepRouting


def stats(flip_rate: list[float] | None, flipped: float, compared: float, **others) -> RoutingStats:
    rate = None if flip_rate is None else np.array(flip_rate)
    return RoutingStats(rate, flipped, compared, others.get("entropy"), others.get("load"))


def test_a_step_without_routes_has_no_metrics():
    step = StepRouting()
    assert step.metrics() == {}
    assert set(step.by_layer().values()) == {None}


def test_updates_are_averaged_and_those_without_a_compared_token_left_out():
    step = StepRouting()
    step.updates = [
        stats([0.1, 0.3], 0.5, 10.0),
        stats([0.3, 0.5], 0.7, 5.0),
        stats(None, float("nan"), 0.0),
    ]
    metrics = step.metrics()
    assert metrics["routing/flip_rate"] == pytest.approx(0.3)
    assert metrics["routing/flipped_tokens"] == pytest.approx(0.6)
    assert step.by_layer()["flip_rate"] == pytest.approx([0.2, 0.4])
    assert "routing/rollout_flip_rate" not in metrics


def test_the_old_policys_pass_gives_entropy_load_and_the_rollouts_flips():
    old = stats(
        [0.2, 0.0],
        0.25,
        8.0,
        entropy=np.array([1.0, 3.0]),
        load=np.array([[0.75, 0.25], [0.5, 0.5]]),
    )
    step = StepRouting(old=old, missing_routes=3, bytes_stored=96, bytes_moved=12)
    assert step.metrics() == pytest.approx(
        {
            "routing/rollout_flip_rate": 0.1,
            "routing/rollout_flipped_tokens": 0.25,
            "routing/entropy": 2.0,
            "routing/load_imbalance": 1.25,
            "routing/replay_bytes": 96.0,
            "routing/bytes_moved": 12.0,
            "routing/missing_routes": 3.0,
        }
    )
    assert step.by_layer()["load"] == [[0.75, 0.25], [0.5, 0.5]]
    assert step.by_layer()["entropy"] == [
        1.0,
        3.0,
    ]


def test_selections_are_averaged_over_the_updates_that_compared_some():
    step = StepRouting(selections_changed=[0.1, None, 0.3])
    assert step.metrics()["routing/selection_flip_rate"] == pytest.approx(0.2)
    assert StepRouting(selections_changed=[None]).metrics() == {}
