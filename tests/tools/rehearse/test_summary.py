"""Everything that would stop a run is a problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gspo.gpus import GIB, find_gpu
from megatron_gspo.tools.rehearse.records import Collective, Finding
from megatron_gspo.tools.rehearse.summary import FailedRank, problems
from tests.tools.rehearse.handmade import memory, point, record, rehearsal


def call(phase: str, size: int, op: str = "allreduce", dtype: str = "float32") -> Collective:
    return Collective(
        op, "tp", (0, 1), dtype, size, ("layer.py:1 forward", "step.py:2 train"), phase
    )


def finding(kind: str) -> Finding:
    return Finding(kind, "they meet", ("layer.py:7 forward",), "forward_backward", 3)


def test_findings_are_problems_unless_a_value_was_made_up():
    assert problems(rehearsal(record(findings=(finding("made_up_value"),)))) == []
    both = rehearsal(*(record(rank, world=2, findings=(finding("dtype_mix"),)) for rank in (0, 1)))
    assert problems(both) == ["ranks 0, 1: dtype_mix: they meet at layer.py:7 forward"]


def test_a_failed_rank_and_a_disagreement_are_problems():
    pair = [record(rank, world=2, collectives=(call("build", 4 + rank),)) for rank in (0, 1)]
    lines = problems(
        replace(rehearsal(*pair), failed=(FailedRank(5, "unknown operation aten.fft"),))
    )
    assert lines[0] == "rank 5: unknown operation aten.fft"
    assert lines[1].startswith("bytes: group tp of ranks 0-1") and len(lines) == 2


@pytest.mark.parametrize("runtime, fits", [(3 * GIB, False), (GIB, True)])
def test_out_of_memory_counts_what_cuda_takes(runtime, fits):
    gpu = find_gpu("h100")
    peak = memory(point(weights=gpu.memory - 2 * GIB))
    lines = problems(replace(rehearsal(record(memory=peak)), runtime_bytes=runtime))
    assert fits == (not lines)
    assert fits or ("out of memory" in lines[0] and "h100" in lines[0])
