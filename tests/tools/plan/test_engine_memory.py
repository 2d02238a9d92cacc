"""Generation: decoding, memory of a colocated engine, weight updates."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.tools.plan.assumptions import parse_assumptions
from megatron_gspo.tools.plan.engine_memory import generation, kv_bytes, sync_seconds, weights_read
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import SMALL, dense_shape, shape_of


def test_decoding_by_hand() -> None:
    shape = dense_shape()
    assert kv_bytes(shape, 1, 2) == 2 * 2 * 1 * 4 * 2
    assert kv_bytes(shape, 2, 2) == 2 * kv_bytes(shape, 1, 2)  # one key-value head on two GPUs
    moe = shape_of(SMALL)
    assert weights_read(moe, 1, 2) == pytest.approx(2 * active_parameters(moe))
    assert weights_read(moe, 10_000, 2) == pytest.approx(2 * total_parameters(moe))
    work = Workload(response_length=100, prompt_length=28, rollout_batch_size=4, n_samples=4, global_batch_size=16)
    found = generation(shape, work, Cluster(GPU, 1, "sglang", 2, 1), IDEAL, 0.0)
    assert found.concurrency == 8  # 16 sequences on two engines
    step = (total_parameters(shape) * 2 + 8 * 78 * 32) / 1e12  # half of the response on average
    prefill = 2 * active_parameters(shape) * 28 * 4 / 2e14
    assert found.seconds == pytest.approx(100 * step + prefill)
    assert found.tail == 0  # mean_response is 1 here
    floor = parse_assumptions(["decode_step_ms=10", "mean_response=0.5"])
    slow = generation(shape, work, Cluster(GPU, 1, "sglang", 2, 1), floor, 0.0)
    assert slow.seconds == pytest.approx(100 * 0.010, rel=1e-3) and slow.tail == pytest.approx(0.5)


def test_a_colocated_engine_that_does_not_fit_says_what_it_lacks() -> None:
    shape = shape_of(SMALL)
    work = Workload(response_length=1000, prompt_length=24)
    room = 40 * 2**30
    found = generation(shape, work, Cluster(GPU, 8, "colocated", 0, 1), IDEAL, GPU.memory - room)
    weights, one = 2 * total_parameters(shape), 1024 * kv_bytes(shape, 1, 2)
    assert found.shortfall == pytest.approx(weights + one - room + 2 * 2**30)


@pytest.mark.parametrize("engines", [1, 8, 256])
def test_new_weights_leave_once_whatever_the_number_of_engines(engines: int) -> None:
    slow_disk = dataclasses.replace(IDEAL, file_system_gbs=1)
    assert sync_seconds(3e10, engines, Cluster(GPU, 8, "sglang", engines, 1), slow_disk) == pytest.approx(3.0)


def test_files_are_written_once_and_read_by_each_engine() -> None:
    fast_disk = dataclasses.replace(IDEAL, file_system_gbs=200)
    assert sync_seconds(1e10, 8, Cluster(GPU, 8, "sglang", 8, 1), fast_disk) == pytest.approx(9 * 1e10 / 200e9)
