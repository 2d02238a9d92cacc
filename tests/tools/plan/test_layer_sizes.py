"""Sizes of a rank worked by hand; ``test_activations`` has the bytes that follow from them."""

from __future__ import annotations

import dataclasses

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, sizes_of
from tests.support.model_shapes import dense_shape


def test_tokens_of_a_rank() -> None:
    shape, batch = dense_shape(), MicroBatch(tokens=64, longest=32)
    alone = sizes_of(shape, ParallelConfig(), batch, Setting())
    assert (alone.s, alone.t, alone.keys, alone.mask) == (64, 64, 64, 0)
    divided = sizes_of(shape, ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2), batch, Setting())
    # a context rank has half of the tokens, whose residual stream tensor ranks share; its keys are gathered
    assert (divided.s, divided.t, divided.keys) == (16, 32, 64 * 1.25)
    assert divided.query == alone.query // 2
    whole = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    assert sizes_of(shape, whole, batch, Setting()).s == 64


def test_scored_positions_and_adapters() -> None:
    shape, batch = dense_shape(), MicroBatch(tokens=64, longest=32)
    assert sizes_of(shape, ParallelConfig(), batch, Setting()).scored == 64
    assert sizes_of(shape, ParallelConfig(), dataclasses.replace(batch, scored=9), Setting()).scored == 9
    frozen = sizes_of(shape, ParallelConfig(), batch, Setting(implementation="torch", lora=LoRAConfig(rank=4)))
    assert frozen.is_frozen and frozen.saved_for("linear_proj", "unknown") == 1
    assert not sizes_of(shape, ParallelConfig(), batch, Setting()).is_frozen
