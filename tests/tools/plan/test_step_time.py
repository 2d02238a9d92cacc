"""Times worked by hand from bytes, products and rates."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.engine_memory import generation
from megatron_gspo.tools.plan.layer_sizes import Setting
from megatron_gspo.tools.plan.step_time import micro_batches, model_flops, step_time
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import dense_shape


def test_a_dense_step_by_hand() -> None:
    """One GPU, no communication: products of three passes and one of scoring, nothing else but Adam."""
    shape = dense_shape()
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
    cluster = Cluster(GPU, 1, "none")
    rollouts = generation(shape, work, cluster, IDEAL, 0.0)
    time = step_time(PlanInputs(shape, work, cluster, IDEAL), ParallelConfig(), 64, Setting(), rollouts)
    tokens = 8 * 32
    layers, head = 2 * 360, 10 * 8  # norms are counted with the products
    products = 2 * tokens * (4 * layers + 5 * head)  # the head is computed again in its backward
    assert time.products == pytest.approx(products / 1e14)
    scores = 2 * (2 * 4) * 32 * 2  # a token: 2 h_q L in each of 2 layers
    assert time.attention == pytest.approx(4 * tokens * scores / 1e14)
    assert (time.tensor, time.expert, time.context, time.pipeline, time.data, time.generation) == (0,) * 6
    assert time.bubble == pytest.approx(0, abs=1e-15)
    assert time.total == pytest.approx(time.products + time.attention + time.optimizer)
    full = Setting(recompute="full")
    again = step_time(PlanInputs(shape, work, cluster, IDEAL), ParallelConfig(), 64, full, rollouts)
    assert again.recompute == pytest.approx((2 * tokens * layers + tokens * scores) / 1e14)


def test_a_value_model_adds_a_pass_and_its_updates_without_the_output_layer() -> None:
    shape = dense_shape()
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
    cluster = Cluster(GPU, 1, "none")
    rollouts = generation(shape, work, cluster, IDEAL, 0.0)
    without, with_values = (
        step_time(PlanInputs(shape, dataclasses.replace(work, value_model=value), cluster, IDEAL), ParallelConfig(), 64,
                  Setting(), rollouts) for value in (False, True)
    )  # fmt: skip
    tokens = 8 * 32
    layers, scores = 2 * 360, 2 * (2 * 4) * 32 * 2
    assert with_values.products - without.products == pytest.approx(2 * tokens * 4 * layers / 1e14)
    assert with_values.attention - without.attention == pytest.approx(4 * tokens * scores / 1e14)
    assert with_values.optimizer == pytest.approx(2 * without.optimizer)
    assert with_values.bubble == pytest.approx(0, abs=1e-15)


def test_a_value_model_waits_in_the_pipeline_as_the_policy_does() -> None:
    shape = dense_shape(num_layers=8, moe_layers=(False,) * 8, vocab_size=1, ffn_hidden_size=4000)
    work = Workload(response_length=30, prompt_length=2, rollout_batch_size=4, n_samples=16, global_batch_size=64,
                    value_model=True)  # fmt: skip
    quiet = Cluster(dataclasses.replace(GPU, nvlink=1e30, network=1e30, hbm=1e30), 4, "none")
    parallel = ParallelConfig(pipeline_model_parallel_size=4)
    rollouts = generation(shape, work, quiet, IDEAL, 0.0)
    time = step_time(PlanInputs(shape, work, quiet, IDEAL), parallel, 64, Setting(), rollouts)
    assert time.bubble / time.training == pytest.approx(3 / (32 + 3), rel=1e-2)


def test_the_bubble_by_hand() -> None:
    """Equal stages without a head: (PP - 1) / (m VP + PP - 1) of the training time is waiting."""
    shape = dense_shape(num_layers=8, moe_layers=(False,) * 8, vocab_size=1, ffn_hidden_size=4000)
    work = Workload(response_length=30, prompt_length=2, rollout_batch_size=4, n_samples=16, global_batch_size=64)
    quiet = Cluster(dataclasses.replace(GPU, nvlink=1e30, network=1e30, hbm=1e30), 4, "none")
    for virtual in (None, 2):
        parallel = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual)
        rollouts = generation(shape, work, quiet, IDEAL, 0.0)
        time = step_time(PlanInputs(shape, work, quiet, IDEAL), parallel, 64, Setting(), rollouts)
        assert micro_batches(64 * 32, 64, parallel) == 32
        assert time.bubble / time.training == pytest.approx(3 / (32 * (virtual or 1) + 3), rel=1e-2)


def test_micro_batches() -> None:
    assert micro_batches(1000, 100, ParallelConfig()) == 10
    assert micro_batches(1001, 100, ParallelConfig()) == 11
    assert micro_batches(10, 100, ParallelConfig(pipeline_model_parallel_size=4)) == 1
    several = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert micro_batches(1001, 100, several) == 12


def test_model_flops() -> None:
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
    tokens, weights = 8 * 32, 2 * 360 + 8 + 80  # without the embedding, which multiplies nothing
    assert model_flops(dense_shape(), work, IDEAL) == pytest.approx(tokens * (6 * weights + 3 * 2 * 2 * 8 * 32))
