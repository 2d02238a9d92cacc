"""Saved bytes worked by hand from the operations, and the numbers of Megatron's schedules."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.activations import dispatch_bytes, head_bytes, layer_bytes, peak_bytes
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.parameters import LayerKind
from tests.support.model_shapes import SMALL, dense_shape, shape_of

CPU = Setting(4, "torch", on_gpu=False)
DENSE, EXPERTS = LayerKind("attention", False), LayerKind("attention", True)


def test_a_dense_layer_by_hand() -> None:
    """h 8, 2 heads and 1 key-value head of 4, MLP 6, float32, one token of 32 in all."""
    z = sizes_of(dense_shape(), ParallelConfig(), MicroBatch(32, 32), CPU)
    elements = (
        8 + 1 + 8  # norm: its input and 1 / root; input of the qkv product
        + 16 + 2 + 1  # the product, whole, kept by the key's norm; a root a head (one group: queries are a view)
        + 8 + 4 + 4 + 8 + 2  # attention: queries, keys, values, output, log-sum
        + 8  # the output gathered, input of the projection
        + 8 + 1 + 8  # norm and input of the MLP
        + 12 + 6 + 6 + 6  # gate over up; silu of the gate, up, their product
    )  # fmt: skip
    assert sum(layer_bytes(z, CPU, DENSE).values()) == 32 * 4 * elements


def test_an_expert_layer_by_hand() -> None:
    """The same attention; 4 experts of 3, 2 a token, all on the rank."""
    shape = dense_shape(moe_layers=(True, True), num_experts=4, experts_per_token=2, moe_ffn_hidden_size=3)
    z = sizes_of(shape, ParallelConfig(), MicroBatch(32, 32), CPU)
    attention = 4 * (17 + 19 + 26 + 8)
    router = 2 * 8 + 2 * 4  # ids and their weights
    experts = 2 * (4 * 8 + 4 * 6 + 4)  # per copy: input, gate over up, weight
    permutation = 2 * 4 * 8 + 8  # a copy's token, expert, place in the probabilities and order; a token's first copy
    whole = attention + 4 * 17 + router + experts + permutation
    assert sum(layer_bytes(z, CPU, EXPERTS).values()) == 32 * whole


def test_parallel_dimensions_cut_what_they_should() -> None:
    shape, batch = shape_of(SMALL), MicroBatch(8192, 8192)
    one = sizes_of(shape, ParallelConfig(), batch, Setting())
    tensor = sizes_of(shape, ParallelConfig(tensor_model_parallel_size=4), batch, Setting())
    assert (tensor.s, tensor.t, tensor.query, tensor.groups) == (2048, 8192, 8, 1)
    assert tensor.rows == one.rows / 4 == 2048 * 8
    context = sizes_of(shape, ParallelConfig(context_parallel_size=4), batch, Setting())
    assert (context.s, context.t, context.keys) == (2048, 2048, 8192 * 9 / 8)
    experts = sizes_of(shape, ParallelConfig(expert_model_parallel_size=8), batch, Setting())
    assert (experts.rows, experts.local) == (one.rows, 16)  # eight ranks send each other the same number
    both = ParallelConfig(expert_model_parallel_size=4, expert_tensor_parallel_size=2)
    assert sizes_of(shape, both, batch, Setting()).rows == 2 * one.rows


def test_rows_between_ranks_by_hand() -> None:
    """Of 8192 tokens a rank sends 65,536 rows of 2048; with ETP 2 it works on those of two ranks."""
    shape, batch, sent = shape_of(SMALL), MicroBatch(8192, 8192), 8192 * 8 * 2048
    z = sizes_of(shape, ParallelConfig(expert_model_parallel_size=8), batch, Setting())
    assert dispatch_bytes(z) == 2 * sent * (1 + 1 + 1 + 1)  # sent, received, outputs by expert, by rank
    parallel = ParallelConfig(expert_model_parallel_size=4, expert_tensor_parallel_size=2)
    z = sizes_of(shape, parallel, batch, Setting(2, "torch"))
    widened = 2 * sent * (1 + 1 + 2 + 2) + 4 * sent * (2 + 1)  # outputs in float32, and their sum
    assert dispatch_bytes(z) == widened
    assert peak_bytes(shape, parallel, 0, batch, 1, Setting(2, "torch"))["working"] == widened
    z = sizes_of(shape, parallel, batch, Setting(4, "torch"))
    assert dispatch_bytes(z) == 4 * sent * (1 + 1 + 2 + 2 + 1)  # they are float32 already


def test_what_passes_between_stages_by_hand() -> None:
    """Four layers of 2048 on two stages, 8192 tokens, recomputed: a layer keeps its input."""
    shape, batch, setting = shape_of(SMALL), MicroBatch(8192, 8192), Setting(2, "torch", "full")
    shape = dataclasses.replace(shape, num_layers=4, moe_layers=(True,) * 4)
    stream, angles = 2 * 8192 * 2048, 2 * 2 * 8192 * 128
    plain = ParallelConfig(pipeline_model_parallel_size=2)
    saved = [peak_bytes(shape, plain, stage, batch, 8, setting)["saved"] for stage in range(2)]
    # two micro-batches of two layers on the first stage; one on the last, and the gradient that it sent
    assert saved == [2 * (2 * stream + angles), 2 * stream + angles + stream]
    both = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    saved = [peak_bytes(shape, both, stage, batch, 8, setting)["saved"] for stage in range(2)]
    # five passes of one layer with their outputs, and the early input and the last gradient sent; three on the last
    # stage, and the last chunk's last two inputs with their gradients
    assert saved == [5 * (2 * stream + angles) + 2 * stream, 3 * (2 * stream + angles) + 6 * stream]


def test_the_head_stays_within_its_budget() -> None:
    """On a GPU no tensor of [tokens, vocabulary]: 8 times the tokens add only what a token has of its own."""
    shape, setting = shape_of(SMALL), Setting()
    heads = []
    for tokens in (8192, 65536):
        z = sizes_of(shape, ParallelConfig(), MicroBatch(tokens, tokens), setting)
        heads.append(head_bytes(z, shape, ParallelConfig(), setting))
    small, large = heads
    of_a_token = 2048 * (2 + 2 + 4) + 64 + 4 * 38  # and a share of each tile: 151,936 words, 4,096 a tile
    assert large.saved + large.working - small.saved - small.working < 57344 * of_a_token
    assert small.weight_gradient == 2 * 151936 * 2048
    assert small.working < small.weight_gradient + 4 * 8192 * 2048 + 1.2 * 256 * 2**20


def test_recomputation_keeps_a_layers_input() -> None:
    shape, parallel, batch = shape_of(SMALL), ParallelConfig(expert_model_parallel_size=8), MicroBatch(8192, 8192)
    peaks = {mode: peak_bytes(shape, parallel, 0, batch, 4, Setting(recompute=mode)) for mode in ("none", "full")}
    z = sizes_of(shape, parallel, batch, Setting())
    layer = sum(layer_bytes(z, Setting(), EXPERTS).values())
    assert peaks["none"]["saved"] == pytest.approx(48 * layer, rel=0.01)
    assert peaks["full"]["total"] < 0.2 * peaks["none"]["total"]
    inputs = 48 * 2 * 8192 * 2048
    assert peaks["full"]["total"] > inputs + layer


def test_interleaving_holds_more() -> None:
    shape, batch = shape_of(SMALL), MicroBatch(8192, 8192)
    plain = ParallelConfig(pipeline_model_parallel_size=4)
    several = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    totals = [peak_bytes(shape, parallel, 0, batch, 32, Setting())["saved"] for parallel in (plain, several)]
    assert totals[1] / totals[0] == pytest.approx((11 / 2) / 4, rel=0.02)  # 2 x 3 + 4 + 1 chunks of half a stage
