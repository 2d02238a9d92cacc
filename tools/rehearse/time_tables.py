"""The tables of a rehearsal's times as rows of text, the first being the heading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_gspo.gpus import Gpu
from megatron_gspo.tools.rehearse.op_times import (
    STEP_PHASES,
    OpTime,
    phase_times,
    rates_of,
    time_of,
    times_by,
)
from megatron_gspo.tools.rehearse.records import OpTotal, RankRecord

Rows = list[list[str]]
MOST_EXPENSIVE = 15


def phase_rows(record: RankRecord, gpu: Gpu) -> Rows:
    """A row for each phase of the step: what the GPU does, the host and the collectives."""
    rows = [
        [
            "time of",
            "launches",
            "GB",
            "TFLOP",
            "GPU, ms",
            "of the peak",
            "host, ms",
            "collectives, ms",
        ]
    ]
    for phase, times in phase_times(record, gpu).items():
        ops = times.ops
        peak = ops.flops / gpu.flops / ops.seconds if ops.seconds else 0.0
        rows.append(
            [
                phase,
                *_amounts(ops),
                f"{100 * peak:.0f} %",
                _milliseconds(times.host),
                _milliseconds(times.communication),
            ]
        )
    return rows


def time_rows(times: Mapping[str, OpTime], name: str) -> Rows:
    """One row for each entry, with its rate and its share of the sum."""
    rows = [[name, "launches", "GB", "TFLOP", "ms", "rate", "share"]]
    total = sum(time.seconds for time in times.values())
    for key, time in times.items():
        rows.append([key, *_amounts(time), _rate(time), f"{100 * time.seconds / total:.1f} %"])
    return rows


def time_tables(record: RankRecord, gpu: Gpu, *, all_times: bool) -> list[Rows]:
    """By phase, and the most expensive operations. all_times: also each phase by class, and by
    class and call site. Without operations there are none.
    """
    if not record.ops:
        return []
    tables = [phase_rows(record, gpu), expensive_rows(record, gpu)]
    rates = rates_of(gpu)
    for phase in STEP_PHASES if all_times else ():
        ops = [op for op in record.ops if op.phase == phase]
        if ops:
            classes = times_by(ops, rates, lambda op: op.op_class)
            tables.append(time_rows(classes, f"{phase}: class"))
            tables.append(time_rows(times_by(ops, rates, site_of), f"{phase}: call site"))
    return tables


def waiting(record: RankRecord, gpu: Gpu) -> list[str]:
    """A line that names the phases in which the GPU waits for the host."""
    phases = [
        phase for phase, times in phase_times(record, gpu).items() if times.host > times.ops.seconds
    ]
    return [f"The GPU waits for the host in {', '.join(phases)}."] if phases else []


def site_of(op: OpTotal) -> str:
    """Class, direction and call site of an operation."""
    direction = "backward" if op.is_backward else "forward"
    return f"{op.op_class}, {direction}, {op.where or 'autograd'}"


def expensive_rows(record: RankRecord, gpu: Gpu) -> Rows:
    """The operations of the step that take the most time."""
    rates = rates_of(gpu)
    ops = [op for op in record.ops if op.phase in STEP_PHASES]
    ops.sort(key=lambda op: -rates.seconds(op))
    total = sum(rates.seconds(op) for op in ops)
    rows = [["operation", "of", "phase", "launches", "ms", "rate", "share", "at"]]
    for op in ops[:MOST_EXPENSIVE]:
        time = time_of(op, rates)
        direction = "backward" if op.is_backward else "forward"
        phase = f"{op.phase}, {direction}" if op.phase == "forward_backward" else op.phase
        rows.append(
            [
                op.op,
                op.tensors,
                phase,
                f"{time.launches:,}",
                _milliseconds(time.seconds),
                _rate(time),
                f"{100 * time.seconds / total:.1f} %",
                op.where,
            ]
        )
    return rows


def _amounts(time: OpTime) -> Sequence[str]:
    """Launches, GB, TFLOP and milliseconds."""
    return (
        f"{time.launches:,}",
        f"{time.bytes / 1e9:.2f}",
        f"{time.flops / 1e12:.2f}",
        _milliseconds(time.seconds),
    )


def _rate(time: OpTime) -> str:
    if not time.seconds:
        return ""
    if time.flops:
        return f"{time.flops / time.seconds / 1e12:.0f} TFLOP/s"
    return f"{time.bytes / time.seconds / 1e12:.2f} TB/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
