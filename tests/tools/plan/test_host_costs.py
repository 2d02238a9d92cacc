"""A host's bytes and seconds worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.host_costs import exposed_seconds, host_costs, owned_bytes, source_bytes
from megatron_gspo.tools.plan.parameters import total_parameters
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import SMALL, dense_shape, shape_of

WORK = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
RATES = dataclasses.replace(IDEAL, receive_us_token=2, receive_ns_id=3, prepare_us_token=5, prepare_ns_id=7)


def test_dense_samples_by_hand() -> None:
    """Two replicas of one GPU: 4 of the 8 sequences each, of 8 + 24 tokens."""
    found = host_costs(PlanInputs(dense_shape(), WORK, Cluster(GPU, 2, "none"), RATES), ParallelConfig())
    assert found.numbers == 8 * 56
    assert found.samples == 4 * (32 * 8 + 24 * 13)
    assert found.answers == 4 * 32 * 40
    assert found.receive == pytest.approx(128 * 2e-6) and found.prepare == pytest.approx(128 * 5e-6)
    inputs = PlanInputs(dense_shape(), WORK, Cluster(GPU, 2, "none"), RATES)
    assert exposed_seconds(inputs, ParallelConfig(), 0.0) == pytest.approx(128 * 7e-6)
    assert exposed_seconds(inputs, ParallelConfig(), 1.0) == pytest.approx(found.prepare)


def test_routes_by_hand() -> None:
    """Qwen3-30B-A3B: 48 layers x 8 experts of 128, a byte each; a stage of two holds those of its 24 layers."""
    cluster = Cluster(GPU, 16, "none")
    parallel = ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=8)
    work = dataclasses.replace(WORK, rollout_batch_size=16)
    found = host_costs(PlanInputs(shape_of(SMALL), work, cluster, RATES), parallel)
    assert found.samples == 8 * (32 * (8 + 24 * 8) + 24 * 13)  # 8 replicas
    assert found.answers == pytest.approx(256 * (40 + 384 * 16 / 3))
    assert found.receive == pytest.approx(256 * (2e-6 + 384 * 3e-9))
    assert found.prepare == pytest.approx(256 * (5e-6 + 384 * 7e-9))
    three = host_costs(PlanInputs(shape_of(SMALL), work, Cluster(GPU, 24, "none"), RATES),
                       dataclasses.replace(parallel, pipeline_model_parallel_size=3))  # fmt: skip
    assert three.samples == 8 * (32 * (8 + 16 * 8) + 24 * 13)  # of the last one; the middle one has no tokens
    without = host_costs(PlanInputs(shape_of(SMALL), dataclasses.replace(work, routes=False), cluster, RATES), parallel)
    assert without.samples == 8 * (32 * 8 + 24 * 13)


def test_all_ranks_together_own_the_model_once() -> None:
    shape, work = shape_of(SMALL), dataclasses.replace(WORK, rollout_batch_size=16)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=8)
    owned = 8 * sum(owned_bytes(shape, parallel, 16, stage, work) for stage in range(2))
    assert owned == pytest.approx(14 * total_parameters(shape), rel=1e-4)


def test_sources_together_send_the_model_once() -> None:
    """Of TP 2, EP 4: the first of a stage sends everything but experts, each of four a quarter of these."""
    shape, work = shape_of(SMALL), WORK
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
                              expert_model_parallel_size=4)  # fmt: skip
    experts = 48 * 128 * 3 * 2048 * 768
    first = sum(source_bytes(shape, parallel, 16, stage, work) for stage in range(2))
    assert first + 3 * 2 * experts / 4 == pytest.approx(2 * total_parameters(shape), rel=1e-4)
