"""Times by hand, with round rates."""

from typing import Any

import pytest

from megatron_gspo.gpus import GIB, GPUS, Gpu
from megatron_gspo.tools.rehearse.op_cost import CLASSES
from megatron_gspo.tools.rehearse.op_times import (
    OpTime,
    Rates,
    collective_seconds,
    phase_times,
    rates_of,
)
from megatron_gspo.tools.rehearse.records import Collective, OpTotal
from megatron_gspo.tools.rehearse.time_tables import waiting
from tests.tools.rehearse.handmade import record

# 100 TFLOP/s, memory 1 TB/s, NVLink 100 GB/s, network 10 GB/s
ROUND = Gpu("round", 100 * GIB, 1e14, 1e12, 1e11, 1e10)
RATES = Rates(
    flops={"product": 5e13}, bytes={"product": 1e12, "copy": 5e11}, kernel=1e-5, host=1e-6
)


def op(op_class: str = "copy", **fields: Any) -> OpTotal:
    made: dict[str, Any] = dict(
        phase="forward_backward",
        is_backward=False,
        op="aten.copy_.default",
        op_class=op_class,
        where="layer.py:1 forward",
        tensors="float32 [16]",
        count=1,
        launches=1,
        read=0,
        written=0,
        flops=0,
    )
    return OpTotal(**(made | fields))


@pytest.mark.parametrize(
    ("total", "seconds"),
    [
        (op(read=3 * 10**8, written=2 * 10**8), 1e-3),  # bytes
        (op(read=3 * 10**8, written=2 * 10**8, count=4), 4e-3),
        (op(read=8, launches=3, count=2), 6e-5),  # the starts of kernels
        (op("product", read=10**8, flops=10**10), 2e-4),
        (op("product", read=10**9, flops=10**10), 1e-3),  # a product of long rows waits for memory
    ],
)
def test_seconds_of_an_operation(total: OpTotal, seconds: float) -> None:
    assert RATES.seconds(total) == pytest.approx(seconds)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_class_has_a_rate_on_every_gpu(gpu: Gpu) -> None:
    rates = rates_of(gpu)
    assert set(rates.bytes) == set(CLASSES)
    assert all(0 < rate <= gpu.flops for rate in rates.flops.values())
    assert all(0 < rate <= gpu.bandwidth for rate in rates.bytes.values())


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
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
    name: str, ranks: tuple[int, ...], seconds: float
) -> None:
    peer = ranks[-1] if name in ("send", "recv") else None
    call = Collective(name, "tp", ranks, "bfloat16", 10**9, (), "forward_backward", peer=peer)
    assert collective_seconds(call, 0, ROUND, 0.5) == pytest.approx(seconds)


def test_phases_have_times_of_gpu_host_and_links() -> None:
    copied = op(read=9 * 10**8)
    built = op(phase="build", read=10**12)
    call = Collective("allgather_base", "tp", (0, 1), "bfloat16", 10**9, (), "forward_backward")
    played = record(ops=(copied, built), issued_ops={"forward_backward": 1000}, collectives=(call,))
    times = phase_times(played, ROUND)
    assert list(times) == ["forward_backward"]
    rates = rates_of(ROUND)
    assert times["forward_backward"].ops == OpTime(1, 9 * 10**8, 0.0, rates.seconds(copied))
    assert times["forward_backward"].host == pytest.approx(1000 * rates.host)
    assert times["forward_backward"].communication == pytest.approx(0.5 / 100 / 0.7)
    assert waiting(played, ROUND) == ["The GPU waits for the host in forward_backward."]
    assert waiting(record(ops=(copied,)), ROUND) == []
