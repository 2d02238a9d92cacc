"""Seconds of collectives, computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.activations import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.communication import (
    Links,
    context_seconds,
    data_seconds,
    expert_seconds,
    send_seconds,
    tensor_seconds,
)
from megatron_gspo.tools.plan.model_states import States
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import SMALL, shape_of

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
    # 16 GPUs: dense over 16 ranks, experts over 2, both across nodes; float32 out, bfloat16 back for each optimizer
    expected = (800 * 15 / 16 + 4000 / 2) / 1e10
    assert data_seconds(dense, expert, parallel, 16, LINKS, IDEAL) == pytest.approx(expected)
    once = dataclasses.replace(parallel, overlap_grad_reduce=True, overlap_param_gather=True)
    expected = (600 * 15 / 16 + 3000 / 2) / 1e10
    assert data_seconds(dense, expert, once, 16, LINKS, IDEAL) == pytest.approx(expected)
    one_optimizer = data_seconds(dense, States(0, 0, 0), ParallelConfig(), 16, LINKS, IDEAL)
    assert one_optimizer == pytest.approx(600 * 15 / 16 / 1e10)
    whole = ParallelConfig(expert_model_parallel_size=8, use_distributed_optimizer=False)
    assert data_seconds(dense, expert, whole, 16, LINKS, IDEAL) == pytest.approx((800 * 15 / 16 + 4000 / 2) / 1e10)
