"""Seconds of a rehearsed step, from records made by hand."""

from __future__ import annotations

import pytest

from megatron_gspo.gpus import GIB, Gpu
from megatron_gspo.tools.rehearse.op_times import rates_of
from megatron_gspo.tools.rehearse.records import Collective, OpTotal
from megatron_gspo.tools.rehearse.step_figures import communication_seconds, compute_seconds
from tests.tools.rehearse.handmade import record

# 100 TFLOP/s, memory 1 TB/s, NVLink 100 GB/s, network 10 GB/s, nodes of 8
ROUND = Gpu("round", 100 * GIB, 1e14, 1e12, 1e11, 1e10)


def call(
    op: str, ranks: tuple[int, ...], size: int, group: str = "tp", phase: str = "forward_backward"
) -> Collective:
    return Collective(op, group, ranks, "bfloat16", size, (), phase)


def op(phase: str, size: int, where: str = "layer.py:1 f") -> OpTotal:
    return OpTotal(phase, False, "aten.copy_.default", "copy", where, "", 1, 1, size, 0, 0)


def test_gradients_are_zeroed_once_a_step_and_added_in_each_micro_batch() -> None:
    where = "megatron/core/distributed/"
    played = record(
        ops=(
            op("forward_backward", 10**12, where + "param_and_grad_buffer.py:970 reset"),
            op("forward_backward", 10**12, where + "distributed_data_parallel.py:440 hook"),
            op("critic", 10**12, "megatron/core/optimizer/clip_grads.py:9 clip_grad_by_total_norm"),
        ),
        phases=("forward_backward", "critic"),
    )
    rate = rates_of(ROUND).bytes["copy"]
    assert compute_seconds(played, 3.0, ROUND) == pytest.approx((1 + 3 + 1) * 1e12 / rate)


def test_gradients_are_exchanged_once_a_step() -> None:
    calls = (
        call("allgather_base", (0, 1), 10**9),
        call("reduce_scatter", (0, 1), 10**9, "dp_cp"),
        call("allgather_base", (0, 1), 10**9, "dp_cp", "optimizer"),
        call("broadcast", (0, 1), 10**9, "world", "weight_export"),
    )
    assert communication_seconds(record(collectives=calls), 4.0, ROUND, 0.5) == pytest.approx(
        (4 + 1 + 1) * 0.5 / 50
    )
