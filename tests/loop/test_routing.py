"""Routing replay in a step: the options of each pass, and what becomes of the samples' routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import RoutingConfig
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.routing import RoutingReplay, stored_bytes
from megatron_gspo.loop.timers import Timers
from megatron_gspo.routing_replay.perturbation import Perturbation
from megatron_gspo.routing_replay.routes import RouteError, RouteShape
from tests.support.samples import make_routes, make_sample

SHAPE = RouteShape(layers=2, k=2, num_experts=8)


def replay(
    *, shape: RouteShape | None = SHAPE, has_ratio: bool = True, **config: Any
) -> RoutingReplay:
    return RoutingReplay(RoutingConfig(**config), shape, has_ratio)


def sample_with_routes(missing: tuple[int, ...] = ()) -> Sample:
    routes = make_routes(4, 2, 2, 8)
    holes = np.isin(np.arange(4), missing) if missing else None
    return make_sample(2, 3, routed_experts=routes, missing_routes=holes)


@pytest.mark.parametrize(
    ("config", "old", "update"),
    [
        ({}, dict(replay=False, record=True), dict(replay=False, compare=True)),
        ({"replay": "r2"}, dict(replay=False, record=True), dict(replay=True, compare=True)),
        (
            {"replay": "r2", "metrics": False},
            dict(replay=False, record=True),
            dict(replay=True, compare=False),
        ),
        ({"replay": "r3"}, dict(replay=True, compare=True), dict(replay=True, compare=True)),
        (
            {"replay": "r3", "replay_old_log_probs": False},
            dict(replay=False, compare=True),
            dict(replay=True),
        ),
        (
            {"replay": "r3", "metrics": False},
            dict(replay=True, record=False, compare=False),
            dict(compare=False),
        ),
        ({"compare_rollout": True}, dict(replay=False, compare=True), dict(replay=False)),
    ],
    ids=str,
)
def test_what_the_routers_do_in_each_pass(config: dict, old: dict, update: dict) -> None:
    made = replay(storage="host", **config)
    for options, expected in ((made.old_policy_options(), old), (made.update_options(0), update)):
        assert options.shape == SHAPE and options.storage == "host"
        assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    "made",
    [
        replay(shape=None, replay="r2"),
        replay(has_ratio=False, replay="none"),
        replay(metrics=False),
    ],
    ids=["no experts", "no ratio", "nothing requested"],
)
def test_the_routers_are_left_alone(made: RoutingReplay) -> None:
    assert made.old_policy_options() is None and made.update_options(0) is None


def test_a_perturbation_knows_its_pass() -> None:
    perturbation = Perturbation(lambda terms: terms.logits)
    for made in (replay(), replay(replay="r3"), replay(metrics=False), replay(has_ratio=False)):
        assert made.update_options(0) is None or made.update_options(0).perturbed_pass is None
        made.perturbation = perturbation
        made.seed = 7
        made.step = 3
        passes = [
            options.perturbed_pass
            for options in (
                made.old_policy_options(),
                made.reference_options(),
                made.update_options(0),
                made.update_options(1),
            )
        ]
        assert all((each.engine, each.seed, each.step) == ("trainer", 7, 3) for each in passes)
        assert all(each.perturbation is perturbation for each in passes)
        phases = [each.phase for each in passes]
        assert phases == ["old policy", "reference policy", "update 0", "update 1"]
    assert replay(shape=None).reference_options() is None


def test_routes_of_the_rollout_are_checked_only_if_they_are_needed() -> None:
    without = SampleBatch.of([make_sample(2, 3)])
    replay().check_rollout_routes(without)
    replay(replay="r3", shape=None).check_rollout_routes(without)
    with pytest.raises(RouteError):
        replay(replay="r3").check_rollout_routes(without)
    with pytest.raises(RouteError):
        replay(replay="r3").check_rollout_routes(SampleBatch.of([sample_with_routes(missing=(1,))]))


@pytest.mark.parametrize(
    "config", [{"replay": "r3", "missing_routes": "live"}, {"compare_rollout": True}], ids=str
)
def test_missing_routes_are_counted_where_they_are_allowed(config: dict) -> None:
    made = replay(**config)
    made.check_rollout_routes(
        SampleBatch.of([sample_with_routes(missing=(1,)), sample_with_routes()])
    )
    assert made.measured.missing_routes == 1


def test_metrics_alone_look_at_some_sequences_over_the_batch() -> None:
    assert replay(metric_sequences=3).metric_sequences(9) == [0, 4, 8]
    assert replay(metric_sequences=20).metric_sequences(9) == list(range(9))


@pytest.mark.parametrize("held", [(), (1,), (0, 1)])
def test_the_bytes_of_routes_are_those_of_all_stages(held: tuple[int, ...]) -> None:
    sample = sample_with_routes()
    kept = replace(sample, routed_experts=sample.routed_experts[:, list(held)])
    shape = replace(SHAPE, held=held)
    assert stored_bytes(TrainingBatch.of([kept]), shape) == 4 * 2 * 2
    assert stored_bytes(TrainingBatch.of([make_sample(2, 3)]), SHAPE) == 0


def test_samples_whose_routes_were_not_recorded_miss_them() -> None:
    samples = [make_sample(2, 3, seed=i) for i in range(3)]
    routes = make_routes(5, 2, 2, 8)
    recorded = Columns.of([1], np.array([5]), routed_experts=routes)
    batch = TrainingBatch.of(samples).with_routes(recorded)
    inputs = batch.inputs
    assert [inputs.of_sample("missing_routes", i).any() for i in range(3)] == [True, False, True]
    np.testing.assert_array_equal(inputs.of_sample("routed_experts", 1), routes)
    assert stored_bytes(batch, SHAPE) == 4 * 2 * 2


def test_without_a_pass_the_samples_keep_the_rollouts_routes() -> None:
    made = replay(replay="r3")
    batch = TrainingBatch.of([sample_with_routes(), replace(sample_with_routes(), prompt_index=1)])
    assert made.with_old_routes(batch, range(2), None, Timers()) is batch
    assert made.measured.bytes_stored == 2 * 16 and made.measured.bytes_moved == 0
    made.add_update(None, batch, Timers(), flips=True)
    assert made.measured.updates == []
