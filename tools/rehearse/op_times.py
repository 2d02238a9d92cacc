"""The time that a rank's operations take a GPU, by measured speeds of their classes
(``rates.yaml``), and that of its collectives.

An operation takes the time of its bytes or that of its floating-point operations, whichever is
longer, and at least that of its kernels' starts. Kernels follow each other without gaps, and
nothing overlaps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_gspo.gpus import Gpu
from megatron_gspo.tools.rehearse.records import Collective, OpTotal, RankRecord

LINK_EFFICIENCY = 0.7  # share of a link's bandwidth that is reached; assumed
STEP_PHASES = (
    "old_log_probs",
    "ref_log_probs",
    "values",
    "critic",
    "forward_backward",
    "optimizer",
)
"""Phases of an optimizer step and of the passes before it."""


@dataclass(frozen=True)
class Rates:
    """The speeds of one GPU. flops, bytes: a second, by class. kernel, host: seconds of a kernel's
    start, and of the host for an operation.
    """

    flops: Mapping[str, float]
    bytes: Mapping[str, float]
    kernel: float
    host: float

    def seconds(self, op: OpTotal) -> float:
        """Seconds of all ``op.count`` calls."""
        slowest = max(
            op.flops / self.flops[op.op_class] if op.op_class in self.flops else 0.0,
            op.bytes / self.bytes[op.op_class],
            op.launches * self.kernel,
        )
        return op.count * slowest


@functools.cache
def rates_of(gpu: Gpu) -> Rates:
    """By ``rates.yaml``."""
    data = yaml.safe_load(Path(__file__).with_name("rates.yaml").read_text(encoding="utf-8"))
    products = data["products"] | data["gpus"].get(gpu.name, {})
    memory = data["memory_share"] * gpu.bandwidth
    others = {name: _together(memory, entry) for name, entry in data["others"].items()}
    return Rates(
        flops={name: entry["share"] * gpu.flops for name, entry in products.items()},
        bytes={
            **others,
            **dict.fromkeys(products, memory),
            "host copy": data["host_copy_gb"] * 1e9,
        },
        kernel=data["kernel_us"] / 1e6,
        host=data["host_us"] / 1e6,
    )


def _together(memory: float, entry: Mapping[str, float]) -> float:
    """Bytes a second of a class whose kernels take time beside that of the memory."""
    if "tb" not in entry:
        return memory
    return 1 / (1 / memory + 1 / (entry["tb"] * 1e12))


@dataclass(frozen=True)
class OpTime:
    """Operations together. seconds: on the GPU."""

    launches: int = 0
    bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: OpTime) -> OpTime:
        return OpTime(
            self.launches + other.launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )


def time_of(op: OpTotal, rates: Rates) -> OpTime:
    """The time of all calls of an operation."""
    return OpTime(
        op.count * op.launches, op.count * op.bytes, op.count * op.flops, rates.seconds(op)
    )


def times_by(
    ops: Iterable[OpTotal], rates: Rates, key: Callable[[OpTotal], str]
) -> dict[str, OpTime]:
    """Operations that have the same key together, the slowest first."""
    totals: dict[str, OpTime] = {}
    for op in ops:
        totals[key(op)] = totals.get(key(op), OpTime()) + time_of(op, rates)
    return dict(sorted(totals.items(), key=lambda item: -item[1].seconds))


@dataclass(frozen=True)
class PhaseTime:
    """The times of one phase. host: seconds in which the host issues the operations; where they are
    more than those of the GPU, the GPU waits. communication: seconds of collectives.
    """

    ops: OpTime
    host: float
    communication: float


def phase_times(record: RankRecord, gpu: Gpu) -> dict[str, PhaseTime]:
    """The times of the phases of a step, in their order."""
    rates = rates_of(gpu)
    totals = times_by(record.ops, rates, lambda op: op.phase)
    return {
        phase: PhaseTime(
            totals.get(phase, OpTime()),
            record.issued_ops.get(phase, 0) * rates.host,
            sum(
                collective_seconds(call, record.rank, gpu, LINK_EFFICIENCY)
                for call in record.collectives
                if call.phase == phase
            ),
        )
        for phase in STEP_PHASES
        if phase in record.phases
    }


def collective_seconds(call: Collective, rank: int, gpu: Gpu, link_efficiency: float) -> float:
    """Seconds of one call: the other ranks' part of its bytes over the links. A ring is as slow as
    its slowest link; an all-to-all and a message take the link to each rank."""
    node = gpu.node
    others = [
        other for other in (call.ranks if call.peer is None else (call.peer,)) if other != rank
    ]
    far = sum(other // node != rank // node for other in others)
    if call.peer is None and "alltoall" not in call.op and far:
        far = len(others)
    share = call.bytes / (len(others) + (call.peer is None)) if others else 0.0
    near = len(others) - far
    return share * (near / gpu.nvlink + far / gpu.network) / link_efficiency
