"""Bytes of gated delta nets worked by hand from the operations of ``mcore/gated_delta_net``; ``agreement`` compares
whole layers with rehearsals."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import DeltaNetSizes
from megatron_gspo.tools.plan.activations import layer_bytes, peak_bytes
from megatron_gspo.tools.plan.communication import context_bytes, context_passes, tensor_bytes
from megatron_gspo.tools.plan.delta_nets import (
    DeltaNet,
    backward_bytes,
    delta_net_of,
    flops,
    gated_norm_bytes,
    kept_bytes,
    saved_bytes,
)
from megatron_gspo.tools.plan.engine_memory import kv_bytes
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.parameters import LayerKind, layer_parameters
from tests.support.model_shapes import NEXT, dense_shape, shape_of

# 2 key heads of 3, 4 value heads of 5, filters of 4 tokens
SIZES = DeltaNetSizes(key_heads=2, value_heads=4, key_size=3, value_size=5, kernel=4)
DELTA, TORCH = LayerKind("gated_delta_net", True), Setting(2, "torch")


def net(tokens: float = 64, longest: int = 64, **sizes: int) -> DeltaNet:
    found = delta_net_of(dense_shape(delta_net=SIZES), ParallelConfig(**sizes), tokens, longest)
    assert found is not None
    return found


def test_parameters_of_a_layer_by_hand() -> None:
    shape = dense_shape(delta_net=SIZES, mixers=("gated_delta_net",) * 2)
    parts = {part.name: part.count for part in layer_parameters(shape, ParallelConfig(), LayerKind(DELTA.mixer, False))}
    del parts["linear_fc1"], parts["linear_fc2"], parts["pre_mlp_layernorm"], parts["input_layernorm"]
    # of a key head: query and key 6, values 10, beta and step 4, gate 10; filters of query, key and values
    assert parts == dict(dt_bias=4, A_log=4, in_proj=2 * 30 * 8, conv1d=2 * 16 * 4, out_norm=5, out_proj=8 * 20)
    cut = ParallelConfig(tensor_model_parallel_size=2)
    halves = {part.name: part.count for part in layer_parameters(shape, cut, LayerKind(DELTA.mixer, False))}
    assert {name: halves[name] for name in parts} == dict(
        dt_bias=2, A_log=2, in_proj=30 * 8, conv1d=16 * 4, out_norm=5, out_proj=8 * 10
    )


def test_the_gate_of_attention_has_rows_of_its_own() -> None:
    kind = LayerKind("attention", False)
    plain, gated = (dense_shape(attention_gate=gate) for gate in (False, True))
    counts = [{part.name: part.count for part in layer_parameters(shape, ParallelConfig(), kind)}
              for shape in (plain, gated)]  # fmt: skip
    assert counts[1]["linear_qkv"] - counts[0]["linear_qkv"] == 2 * 4 * 8


def test_the_rule_in_one_chunk_by_hand() -> None:
    """64 tokens, a chunk; two key heads; numbers of a token."""
    pairs, values, states = 2 * 64, 4 * 5, 4 * 3 * 5 / 64
    wide = 32 * (67 / 64) + 32 + 32  # the chunk after 3 tokens before it, the convolution, its activation
    unit = 6 * 6  # queries and keys: of unit length, contiguous, and each transposed
    products = 2 * pairs + 4 * 2 * pairs  # per key head; decay, two systems and what is within the chunk per value head
    solved = 2 * (values + 12)  # right side and solution
    assert kept_bytes(net(), 2) == 4 * 64 * (wide + unit + products + solved + 2 * 12 + values + states)
    assert kept_bytes(net(), 8) == 2 * kept_bytes(net(), 4)
    assert kept_bytes(net(80, 80), 2) == 2 * kept_bytes(net(), 2)  # the second chunk has 16 tokens


def test_what_a_layer_saves_by_hand() -> None:
    norm = 4 * 64 * (4 * 20 + 4)  # outputs, their norm, gate and its activation; a root a head
    assert gated_norm_bytes(net(), 2) == norm
    assert saved_bytes(net(), 2, keeps_rule=False) == 2 * 64 * 2 * 30 + norm  # the projection
    exchanged = net(context_parallel_size=2)
    assert saved_bytes(exchanged, 2, keeps_rule=False) == 2 * 64 * 2 * 20 + norm  # without the gate
    assert saved_bytes(net(), 2, keeps_rule=True) == kept_bytes(net(), 2) + norm


def test_the_backward_by_hand() -> None:
    states = 4 * 3 * 5 / 64
    assert backward_bytes(net(), 2) == 4 * 64 * (2 * 20 + 12 + 3 * states - 6 - 2 * 64) + 2 * 64 * 20


def test_products_by_hand() -> None:
    """Two products of keys with 64 others; per value head the solution, and what is within and between chunks."""
    assert flops(net()) == 64 * (4 * 6 * 64 + 3 * 20 * 64 + 12 * 64 + 6 * 4 * 3 * 5)


def test_ranks_exchange_heads_for_tokens() -> None:
    shape, parallel = shape_of(NEXT), ParallelConfig(context_parallel_size=2, tensor_model_parallel_size=2)
    z = sizes_of(shape, parallel, MicroBatch(8192, 8192), TORCH)
    # 8 of 16 heads: query, key, two values, beta and step of each; and 16 values
    assert context_bytes(z, parallel, "gated_delta_net") == 2 * 4096 * (8 * (512 + 4) + 16 * 128)
    assert context_bytes(z, parallel, "attention") == 2 * 2 * 4096 * 2 * 256
    passes = {mode: context_passes(Setting(2, "torch", mode), "gated_delta_net") for mode in ("none", "full")}
    assert passes == dict(none=2.0, full=3.0)
    assert tensor_bytes(z, is_moe=True) == 4 * 2 * 4096 * 2048  # the shared expert gathers its tokens too


def test_only_attention_has_keys_and_values_in_an_engine() -> None:
    assert kv_bytes(shape_of(NEXT), 2, 2) == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_of_both_kinds_of_layers(recompute: str) -> None:
    """The peak of 4 layers is below that of 4 gated delta nets and above that of 4 layers of attention."""
    shape, batch, setting = shape_of(NEXT), MicroBatch(4096, 2048), Setting(2, "torch", recompute)
    parallel = ParallelConfig(expert_model_parallel_size=8)
    peaks = []
    for mixers in (("attention",) * 4, ("gated_delta_net",) * 3 + ("attention",), ("gated_delta_net",) * 4):
        own = dataclasses.replace(shape, num_layers=4, moe_layers=(True,) * 4, mixers=mixers, windows=(None,) * 4)
        peaks.append(peak_bytes(own, parallel, 0, batch, 2, setting)["total"])
    z = sizes_of(shape, parallel, batch, setting)
    assert z.delta_net is not None
    rule = saved_bytes(z.delta_net, 2, keeps_rule=recompute == "full")  # which else runs again in the backward
    assert layer_bytes(z, setting, DELTA)["delta net"] == rule
    more = sum(layer_bytes(z, setting, DELTA).values()) - sum(
        layer_bytes(z, setting, LayerKind("attention", True)).values()
    )
    if recompute == "none":
        assert peaks[1] - peaks[0] == pytest.approx(3 * more)
        assert peaks[2] - peaks[1] > more  # the last layer's delta rule runs again where all is held
    else:  # one layer runs again at a time; behind the last gated delta net the input of a layer is gone
        stream = 2 * 4096 * 2048
        assert [peaks[1] - peaks[0], peaks[2] - peaks[1]] == pytest.approx([more - stream, stream])
