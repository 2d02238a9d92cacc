"""All rehearsed ranks of a world together: totals, what would stop or corrupt a run, and the
JSON document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.errors import show_bytes
from megatron_gspo.gpus import Gpu
from megatron_gspo.tools.rehearse.deadlock import Comparison
from megatron_gspo.tools.rehearse.op_times import phase_times, rates_of
from megatron_gspo.tools.rehearse.records import Collective, RankRecord

CANNOT_PROVE = (
    "Transformer Engine's kernels: the model has torch layers here",
    "numerics: tensors have no data",
    "NCCL itself: its topology, buffers and time-outs",
    (
        "fragmentation: memory is that of live tensors, without what the allocator and the CUDA"
        " context take"
    ),
    "speed: times are those of counted operations at speeds that were measured on one GPU",
)


@dataclass(frozen=True)
class FailedRank:
    """A rank whose rehearsal stopped.

    message: one line; output: the end of what its process wrote.
    """

    rank: int
    message: str
    output: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of one config and world. layout: such as ``TP2 EP8``; runtime_bytes: of a
    GPU's memory, that CUDA, NCCL and cuBLAS take."""

    config: str
    world: int
    layout: str
    gpu: Gpu
    runtime_bytes: int
    records: tuple[RankRecord, ...]
    failed: tuple[FailedRank, ...]
    comparison: Comparison

    @property
    def fullest(self) -> RankRecord:
        """The rank with the largest peak; there must be a record."""
        return max(self.records, key=lambda record: record.memory.peak.total)


@dataclass(frozen=True)
class CollectiveTotal:
    """Calls of one kind in a phase. bytes: of all ``count`` calls together."""

    phase: str
    group: str
    op: str
    dtype: str
    count: int
    bytes: int


def collective_totals(calls: Sequence[Collective]) -> list[CollectiveTotal]:
    """Calls by phase, group, operation and dtype, in the order of the first of each."""
    totals: dict[tuple[str, str, str, str], list[int]] = {}
    for call in calls:
        total = totals.setdefault((call.phase, call.group, call.op, call.dtype), [0, 0])
        total[0] += 1
        total[1] += call.bytes
    return [CollectiveTotal(*key, *total) for key, total in totals.items()]


def problems(rehearsal: Rehearsal) -> list[str]:
    """What would stop or corrupt a run, one line each; none means that a run passes the
    rehearsed steps.
    """
    found = [f"rank {failed.rank}: {failed.message}" for failed in rehearsal.failed]
    found += [str(disagreement) for disagreement in rehearsal.comparison.disagreements]
    for message, ranks in _defects(rehearsal.records).items():
        found.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {message}")
    room = rehearsal.gpu.memory - rehearsal.runtime_bytes
    for record in rehearsal.records:
        peak = record.memory.peak
        if peak.total > room:
            found.append(
                f"rank {record.rank}: out of memory: {show_bytes(peak.total)} at {peak.op} in"
                f" {peak.phase}, of {show_bytes(room)} that {rehearsal.gpu.name} has beside"
                f" {show_bytes(rehearsal.runtime_bytes)} of CUDA and NCCL"
            )
    return found


def to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """The document of ``--json``; bytes and counts are integers, times seconds, call sites
    lists, innermost first.
    """
    comparison = rehearsal.comparison
    faults = problems(rehearsal)
    return {
        "config": rehearsal.config,
        "world": rehearsal.world,
        "layout": rehearsal.layout,
        "passes": not faults,
        "problems": faults,
        "roles": [_role(record, rehearsal.gpu) for record in rehearsal.records],
        "failed": [dataclasses.asdict(failed) for failed in rehearsal.failed],
        "disagreements": [dataclasses.asdict(one) for one in comparison.disagreements],
        "compared_groups": {
            name: dataclasses.asdict(group) for name, group in comparison.groups.items()
        },
        "groups_with_one_rehearsed_rank": list(comparison.alone),
        "gpu": {
            "name": rehearsal.gpu.name,
            "memory": rehearsal.gpu.memory,
            "runtime": rehearsal.runtime_bytes,
        },
        "cannot_prove": list(CANNOT_PROVE),
    }


def _role(record: RankRecord, gpu: Gpu) -> dict[str, Any]:
    """All of a record, with its collectives as totals; to each operation the seconds of all its
    calls.
    """
    memory = record.memory
    rates = rates_of(gpu)
    return dataclasses.asdict(record) | {
        "collectives": [
            dataclasses.asdict(total) for total in collective_totals(record.collectives)
        ],
        "ops": [dataclasses.asdict(op) | {"seconds": rates.seconds(op)} for op in record.ops],
        "times": {
            phase: dataclasses.asdict(times) for phase, times in phase_times(record, gpu).items()
        },
        "peak_bytes": memory.peak.total,
        "peak_activation_bytes": memory.peak_activations.bytes.get("activations", 0),
        "phase_peaks": {phase: point.total for phase, point in memory.peaks.items()},
        "seconds": sum(record.seconds.values()),
    }


def _defects(records: Sequence[RankRecord]) -> dict[str, list[int]]:
    """Findings that are defects, and the ranks that have them."""
    ranks_of_defect: dict[str, list[int]] = {}
    for record in records:
        for finding in record.findings:
            if finding.is_defect:
                place = f" at {finding.where[0]}" if finding.where else ""
                ranks = ranks_of_defect.setdefault(f"{finding.kind}: {finding.message}{place}", [])
                if record.rank not in ranks:
                    ranks.append(record.rank)
    return ranks_of_defect
