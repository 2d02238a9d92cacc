"""Seconds of a rehearsed step, from records made by hand."""

from __future__ import annotations

import pytest

from megatron_gspo.tools.plan.estimate import Hardware
from megatron_gspo.tools.plan.hardware import GIB, Gpu
from megatron_gspo.tools.plan.rehearsals import (
    collective_seconds,
    communication_seconds,
    compute_seconds,
)
from megatron_gspo.tools.rehearse.records import Collective
from tests.tools.rehearse.handmade import record

# 100 TFLOP/s, NVLink 100 GB/s, network 10 GB/s, nodes of 8; half of each is reached
HALF = Hardware(Gpu("round", 100 * GIB, 1e14, 1e11, 1e10), 16, 0.5, 0.5)


def call(
    op: str, ranks: tuple[int, ...], size: int, group: str = "tp", phase: str = "forward_backward"
) -> Collective:
    peer = ranks[-1] if op in ("send", "recv") else None
    return Collective(op, group, ranks, "bfloat16", size, (), phase, peer=peer)


def test_flops_of_a_step() -> None:
    """Micro-batches count as often as a mini-batch has them, the optimizer once, the build never;
    of attention, which is causal, half."""
    flops = {
        "build": {"aten::mm": 7 * 10**13},
        "forward_backward": {"aten::mm": 10**13, "torch_attn::_varlen_attn": 2 * 10**13},
        "optimizer": {"aten::mm": 10**13},
    }
    assert compute_seconds(record(flops=flops), 3.0, HALF) == pytest.approx(
        (3 * 2 + 1) * 1e13 / 5e13
    )


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        # Three quarters of 1 GB come from others, over NVLink.
        ("allgather_base", (0, 1, 2, 3), 0.75 / 50),
        ("allgather_base", (0, 8), 0.5 / 5),  # over the network
        ("allgather_base", (0, 1, 8, 9), 0.75 / 5),  # a ring with one slow link
        ("alltoall_base", (0, 1, 8, 9), 0.25 / 50 + 0.5 / 5),  # each part over its own link
        ("send", (0, 8), 1.0 / 5),
        ("allreduce", (0,), 0.0),
    ],
)
def test_a_collective_takes_the_links_between_its_ranks(
    op: str, ranks: tuple[int, ...], seconds: float
) -> None:
    assert collective_seconds(call(op, ranks, 10**9), 0, HALF) == pytest.approx(seconds)


def test_gradients_are_exchanged_once_a_step() -> None:
    calls = (
        call("allgather_base", (0, 1), 10**9),
        call("reduce_scatter", (0, 1), 10**9, "dp_cp"),
        call("allgather_base", (0, 1), 10**9, "dp_cp", "optimizer"),
        call("broadcast", (0, 1), 10**9, "world", "weight_export"),
    )
    assert communication_seconds(record(collectives=calls), 4.0, HALF) == pytest.approx(
        (4 + 1 + 1) * 0.5 / 50
    )
