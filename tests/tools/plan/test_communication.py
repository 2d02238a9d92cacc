"""Seconds of collectives, computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models import family_of
from megatron_gspo.tools.plan.communication import (
    Links,
    context_passes,
    context_seconds,
    data_seconds,
    expert_seconds,
    layer_passes,
    mini_batch_bytes,
    outer_bytes,
    pipeline_bytes,
    send_seconds,
    tensor_seconds,
)
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.model_states import States
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import SMALL, shape_of
from tests.support.tiny_models import tiny_config

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
    z, parallel = z_of(ep=4, etp=2)  # ETP: 16 copies of each token are gathered and, in float32, scattered; half is own
    of_etp = 0.5 * 16 * 8000 * 2048 * (2 + 4) / 1e11
    assert expert_seconds(z, parallel, LINKS, IDEAL) == pytest.approx(2 * 3 / 4 * 8 * 8000 * 2048 * 2 / 1e11 + of_etp)
    z, parallel = z_of(cp=2)  # the other 4000 tokens' keys and values, 4 heads of 128 each
    assert context_seconds(z, parallel, "attention", LINKS, IDEAL) == pytest.approx(4000 * 2 * 4 * 128 * 2 / 1e11)
    z, parallel = z_of(pp=4)  # neighbours of a stage of 8 GPUs are on another node
    assert send_seconds(z, parallel, LINKS, 32) == pytest.approx(8000 * 2048 * 2 / 1e10)


@pytest.mark.parametrize(("kind", "gathered"), [("moonlight", 16 + 32), ("deepseek", 16 + 24)])
def test_latents_are_gathered_over_tensor_ranks(kind: str, gathered: int) -> None:
    """Of keys and values 16, of queries 24 or the hidden size of 32; each three times, what is scattered twice. The
    dense layer and the shared experts gather and scatter as much as other models'."""
    _, shape = family_of(tiny_config(kind).to_dict())
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    found = mini_batch_bytes(shape, parallel, 2, 0, MicroBatch(100, 100, scored=50), 1, Setting(2, "torch", "none"))
    layer = 3 * gathered + 2 * 32 + 3 * 32 + 2 * 32
    assert found["tensor"] == 2 * 100 * (4 * layer + 2 * 32) + 50 * 32 * (2 + 2 + 4)


@pytest.mark.parametrize(("implementation", "recompute", "expected"), [
    ("torch", "none", (2.5, 2, 2)), ("torch", "selective", (2.5, 2, 3)), ("torch", "full", (3.5, 3, 3)),
    ("transformer_engine", "none", (2.5, 2, 3)), ("transformer_engine", "full", (3.5, 3, 4)),
])  # fmt: skip
def test_passes_of_a_layer(implementation: str, recompute: str, expected: tuple[float, ...]) -> None:
    setting = Setting(2, implementation, recompute)
    found = layer_passes(setting)
    assert (found["tensor"], found["expert"], context_passes(setting, "attention")) == expected


def test_neighbours_in_a_pipeline() -> None:
    """Each part of the model but the first gets hidden states and returns gradients; each but the last the reverse."""
    for chunks in (None, 2):
        parallel = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks)
        z = sizes_of(shape_of(SMALL), parallel, MicroBatch(8000, 8000), Setting())
        found = [pipeline_bytes(z, parallel, stage) / (8000 * 2048 * 2) for stage in range(4)]
        assert found == ([2, 4, 4, 2] if chunks is None else [6, 8, 8, 6])


def test_a_mini_batch_by_hand() -> None:
    """Qwen3-30B-A3B on 32 GPUs, the last of two stages with 24 layers; three micro-batches of 8,000 tokens."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2,
        expert_model_parallel_size=4, expert_tensor_parallel_size=2,
    )  # fmt: skip
    batch = MicroBatch(8000, 8000, scored=3000)
    found = mini_batch_bytes(shape_of(SMALL), parallel, 32, 1, batch, 3, Setting(2, "torch", "full"))
    layers, tokens = 3 * 24, 4000  # of a context-parallel rank; half of them of a tensor-parallel rank
    assert found["tensor"] == layers * 3.5 * 2 * tokens * 2048 * 2 + 3 * 3000 * 2048 * (2 + 2 + 4)
    assert found["context"] == layers * 3 * 8000 * 2 * 2 * 128 * 2  # keys and values, 2 heads of 128
    assert found["expert"] == layers * 3 * 2 * 2000 * 8 * 2048 * 2
    assert found["expert tensor"] == layers * 3 * 2 * 2000 * 8 * 2048 * (2 + 4)
    assert found["pipeline"] == 3 * 2 * 2000 * 2048 * 2
    experts = 24 * 32 * 3 * 384 * 2048
    assert found["expert gradients"] == found["expert weights"] == 4 * experts  # each optimizer gathers in 2 bytes
    assert found["gradients"] == found["weights"] > 4 * (151936 // 2 * 2048 + 24 * 2048 * 128)
    one = mini_batch_bytes(shape_of(SMALL), ParallelConfig(), 1, 0, batch, 3, Setting())
    assert one == {}


def test_the_ends_of_the_model_over_tensor_ranks() -> None:
    z, parallel = z_of(tp=2)
    whole = 8000 * 2048 * (2 * 2 + 2 * 2 + 4)  # the log-prob head has all positions without a mask
    assert outer_bytes(z, parallel, 0) == whole
    assert outer_bytes(z, dataclasses.replace(parallel, pipeline_model_parallel_size=2), 0) == 8000 * 2048 * 4


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
