"""Times worked by hand from bytes, products and rates."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.activations import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.assumptions import Assumptions, parse_assumptions
from megatron_gspo.tools.plan.communication import (
    Links,
    context_seconds,
    data_seconds,
    expert_seconds,
    send_seconds,
    tensor_seconds,
)
from megatron_gspo.tools.plan.engine_memory import generation, kv_bytes, sync_seconds, weights_read
from megatron_gspo.tools.plan.hardware import Gpu
from megatron_gspo.tools.plan.model_states import States
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters
from megatron_gspo.tools.plan.step_time import micro_batches, model_flops, step_time
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.model_shapes import SMALL, dense_shape, shape_of

# Round rates, everything reached: 100 TFLOP/s, HBM 1 TB/s, NVLink 100 GB/s, network 10 GB/s
GPU = Gpu("round", 100 * 2**30, 1e14, 1e12, 1e11, 1e10)
IDEAL = dataclasses.replace(
    Assumptions(), matmul_efficiency=1, attention_efficiency=1, expert_efficiency=1, expert_half_rows=0,
    tensor_efficiency=1, elementwise_share=0, packing_imbalance=1, expert_imbalance=1, nvlink_efficiency=1,
    network_efficiency=1, all_to_all_efficiency=1, context_exposed=1, mean_response=1, engine_bandwidth=1,
    engine_flops=1, decode_step_ms=0, other_seconds=0, engine_memory=1,
)  # fmt: skip
LINKS = Links.of(GPU, IDEAL)


def z_of(tokens: int = 8000, **sizes: int):  # noqa: ANN201
    keys = dict(tp="tensor_model_parallel_size", cp="context_parallel_size", ep="expert_model_parallel_size",
                etp="expert_tensor_parallel_size", pp="pipeline_model_parallel_size")  # fmt: skip
    parallel = ParallelConfig(**{keys[key]: value for key, value in sizes.items()})
    return sizes_of(shape_of(SMALL), parallel, MicroBatch(tokens, tokens), Setting()), parallel


def test_collectives_by_hand() -> None:
    z, parallel = z_of(tp=4)  # gather and scatter of 8000 x 2048 bfloat16, three quarters of it from others
    assert tensor_seconds(z, parallel, LINKS, is_moe=True) == pytest.approx(2 * 0.75 * 8000 * 2048 * 2 / 1e11)
    assert tensor_seconds(z, parallel, LINKS, is_moe=False) == pytest.approx(4 * 0.75 * 8000 * 2048 * 2 / 1e11)
    z, parallel = z_of(ep=8)  # 8 copies of each token out and back, an eighth stays
    assert expert_seconds(z, parallel, LINKS, IDEAL) == pytest.approx(2 * 7 / 8 * 8 * 8000 * 2048 * 2 / 1e11)
    z, parallel = z_of(ep=16)  # half of the ranks are on the other node, seven sixteenths on this one
    far, near = 8 / 16 / 1e10, 7 / 16 / 1e11
    assert expert_seconds(z, parallel, LINKS, IDEAL) == pytest.approx(2 * 8 * 8000 * 2048 * 2 * (far + near))
    z, parallel = z_of(cp=2)  # the other 4000 tokens' keys and values, 4 heads of 128 each
    assert context_seconds(z, parallel, LINKS, IDEAL) == pytest.approx(4000 * 2 * 4 * 128 * 2 / 1e11)
    z, parallel = z_of(pp=4)  # neighbours of a stage of 8 GPUs are on another node
    assert send_seconds(z, parallel, LINKS, 32) == pytest.approx(8000 * 2048 * 2 / 1e10)


def test_gradients_by_hand() -> None:
    dense, expert = States(200, 400, 0), States(1000, 2000, 0)
    parallel = ParallelConfig(expert_model_parallel_size=8)
    # 16 GPUs: dense over 16 ranks, experts over 2, both across nodes; float32 out, bfloat16 back
    expected = (600 * 15 / 16 + 3000 / 2) / 1e10
    assert data_seconds(dense, expert, parallel, 16, LINKS, IDEAL) == pytest.approx(expected)
    whole = ParallelConfig(expert_model_parallel_size=8, use_distributed_optimizer=False)
    assert data_seconds(dense, expert, whole, 16, LINKS, IDEAL) == pytest.approx((800 * 15 / 16 + 4000 / 2) / 1e10)


def test_a_dense_step_by_hand() -> None:
    """One GPU, no communication: products of three passes and one of scoring, nothing else but Adam."""
    shape = dense_shape()
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
    cluster = Cluster(GPU, 1, "none")
    rollouts = generation(shape, work, cluster, IDEAL, 0.0)
    time = step_time(shape, ParallelConfig(), 64, work, cluster, IDEAL, Setting(), rollouts)
    tokens = 8 * 32
    layers, head = 2 * 360, 10 * 8  # norms are counted with the products
    products = 2 * tokens * (4 * layers + 5 * head)  # the head is computed again in its backward
    assert time.products == pytest.approx(products / 1e14)
    scores = 2 * (2 * 4) * 32 * 2  # a token: 2 h_q L in each of 2 layers
    assert time.attention == pytest.approx(4 * tokens * scores / 1e14)
    assert (time.tensor, time.expert, time.context, time.pipeline, time.data, time.generation) == (0,) * 6
    assert time.bubble == pytest.approx(0, abs=1e-15)
    assert time.total == pytest.approx(time.products + time.attention + time.optimizer)
    again = step_time(shape, ParallelConfig(), 64, work, cluster, IDEAL, Setting(recompute="full"), rollouts)
    assert again.recompute == pytest.approx((2 * tokens * layers + tokens * scores) / 1e14)


def test_the_bubble_by_hand() -> None:
    """Equal stages without a head: (PP - 1) / (m VP + PP - 1) of the training time is waiting."""
    shape = dense_shape(num_layers=8, moe_layers=(False,) * 8, vocab_size=1, ffn_hidden_size=4000)
    work = Workload(response_length=30, prompt_length=2, rollout_batch_size=4, n_samples=16, global_batch_size=64)
    quiet = Cluster(dataclasses.replace(GPU, nvlink=1e30, network=1e30, hbm=1e30), 4, "none")
    for virtual in (None, 2):
        parallel = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual)
        time = step_time(shape, parallel, 64, work, quiet, IDEAL, Setting(), generation(shape, work, quiet, IDEAL, 0.0))
        assert micro_batches(64 * 32, 64, parallel) == 32
        assert time.bubble / time.training == pytest.approx(3 / (32 * (virtual or 1) + 3), rel=1e-2)


def test_micro_batches() -> None:
    assert micro_batches(1000, 100, ParallelConfig()) == 10
    assert micro_batches(1001, 100, ParallelConfig()) == 11
    assert micro_batches(10, 100, ParallelConfig(pipeline_model_parallel_size=4)) == 1
    several = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert micro_batches(1001, 100, several) == 12


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


def test_new_weights_take_the_faster_route() -> None:
    cluster = Cluster(GPU, 8, "sglang", 8, 1)
    assert sync_seconds(1e10, 8, cluster, IDEAL) == pytest.approx(9 * 1e10 / 20e9)
    slow_disk = dataclasses.replace(IDEAL, file_system_gbs=1)
    assert sync_seconds(1e10, 8, cluster, slow_disk) == pytest.approx(8 * 1e10 / 1e10)


def test_model_flops() -> None:
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=4)
    tokens, weights = 8 * 32, 2 * 360 + 8 + 80  # without the embedding, which multiplies nothing
    assert model_flops(dense_shape(), work, IDEAL) == pytest.approx(tokens * (6 * weights + 3 * 2 * 2 * 8 * 32))
