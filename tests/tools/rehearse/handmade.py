"""Records of ranks, made by hand."""

from __future__ import annotations

from typing import Any

from megatron_gspo.gpus import find_gpu
from megatron_gspo.tools.rehearse.deadlock import compare_ranks
from megatron_gspo.tools.rehearse.records import Memory, MemoryPoint, RankRecord
from megatron_gspo.tools.rehearse.summary import Rehearsal


def point(index: int = 0, phase: str = "forward_backward", **kinds: int) -> MemoryPoint:
    return MemoryPoint(phase, index, "aten.mm", ("layer.py:1 forward",), kinds)


def memory(*timeline: MemoryPoint) -> Memory:
    """With the peaks of a timeline."""
    points = timeline or (point(weights=8, activations=4),)
    peak = max(points, key=lambda each: each.total)
    activations = max(points, key=lambda each: each.bytes.get("activations", 0))
    phases = dict.fromkeys(each.phase for each in points)
    peaks = {
        phase: max((each for each in points if each.phase == phase), key=lambda each: each.total)
        for phase in phases
    }
    return Memory({"weights": 8, "gradients": 8, "optimizer": 24}, peak, activations, peaks, ())


def record(rank: int = 0, **fields: Any) -> RankRecord:
    """A record of a rank that did nothing else."""
    made: dict[str, Any] = dict(
        rank=rank,
        world=1,
        coordinates={},
        groups={"pp": (rank,)},
        phases=("build", "forward_backward"),
        micro_batches=(16, 16),
        collectives=(),
        host_syncs=(),
        host_copies=(),
        findings=(),
        memory=memory(),
        checkpoint=None,
        flops={},
        seconds={"build": 1.0, "forward_backward": 2.0},
        host_peak_bytes=0,
        versions={},
        stands_for=(rank,),
    )
    return RankRecord(**(made | fields))


def rehearsal(*records: RankRecord) -> Rehearsal:
    """Of these ranks, compared."""
    return Rehearsal(
        "config.yaml",
        records[0].world,
        "TP2",
        find_gpu("h100"),
        0,
        records,
        (),
        compare_ranks(records),
    )
