"""Totals are sums; everything that would stop a run is a problem; the JSON document has every
role.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_gspo.tools.plan.hardware import GIB, find_gpu
from megatron_gspo.tools.rehearse.records import Collective, Finding, HostSync
from megatron_gspo.tools.rehearse.summary import FailedRank, collective_totals, problems, to_json
from tests.tools.rehearse.handmade import memory, point, record, rehearsal


def call(phase: str, size: int, op: str = "allreduce", dtype: str = "float32") -> Collective:
    return Collective(
        op, "tp", (0, 1), dtype, size, ("layer.py:1 forward", "step.py:2 train"), phase
    )


def test_totals_are_by_phase_group_operation_and_dtype():
    calls = [
        call("build", 1),
        call("optimizer", 2),
        call("build", 4),
        call("build", 8, dtype="bfloat16"),
    ]
    found = [(one.phase, one.dtype, one.count, one.bytes) for one in collective_totals(calls)]
    assert found == [
        ("build", "float32", 2, 5),
        ("optimizer", "float32", 1, 2),
        ("build", "bfloat16", 1, 8),
    ]


def test_the_document_has_what_a_role_did():
    calls = (call("build", 1), call("optimizer", 2), call("optimizer", 4, op="broadcast"))
    syncs = (
        HostSync("item", ("a.py:1 f",), "optimizer", 2),
        HostSync("item", ("b.py:1 f", "c.py:2 g"), "build", 5),
    )
    timeline = (
        point(0, weights=8),
        point(1, weights=8, activations=6),
        point(2, weights=16, activations=2),
    )
    whole = rehearsal(
        record(3, collectives=calls, host_syncs=syncs, memory=memory(*timeline), stands_for=(3, 5))
    )
    document = json.loads(json.dumps(to_json(whole)))
    (role,) = document["roles"]
    assert document["passes"] and document["problems"] == [] and role["stands_for"] == [3, 5]
    assert (role["rank"], role["peak_bytes"], role["peak_activation_bytes"], role["seconds"]) == (
        3,
        18,
        6,
        3.0,
    )
    assert role["collectives"] == [
        {
            "op": "allreduce",
            "group": "tp",
            "count": 2,
            "bytes": 3,
            "phases": {"build": {"count": 1, "bytes": 1}, "optimizer": {"count": 1, "bytes": 2}},
        },
        {
            "op": "broadcast",
            "group": "tp",
            "count": 1,
            "bytes": 4,
            "phases": {"optimizer": {"count": 1, "bytes": 4}},
        },
    ]
    assert [(sync["where"], sync["count"]) for sync in role["host_syncs"]] == [
        (["b.py:1 f", "c.py:2 g"], 5),
        (["a.py:1 f"], 2),
    ]


def finding(kind: str) -> Finding:
    return Finding(kind, "they meet", ("layer.py:7 forward",), "forward_backward", 3)


def test_findings_are_problems_unless_a_value_was_made_up():
    assert problems(rehearsal(record(findings=(finding("made_up_value"),)))) == []
    both = rehearsal(*(record(rank, world=2, findings=(finding("dtype_mix"),)) for rank in (0, 1)))
    assert problems(both) == ["ranks 0, 1: dtype_mix: they meet at layer.py:7 forward"]


def test_a_failed_rank_and_a_disagreement_are_problems():
    pair = [record(rank, world=2, collectives=(call("build", 4 + rank),)) for rank in (0, 1)]
    found = problems(
        replace(rehearsal(*pair), failed=(FailedRank(5, "unknown operation aten.fft"),))
    )
    assert found[0] == "rank 5: unknown operation aten.fft"
    assert found[1].startswith("bytes: group tp of ranks 0-1") and len(found) == 2


@pytest.mark.parametrize("runtime, fits", [(3 * GIB, False), (GIB, True)])
def test_out_of_memory_counts_what_cuda_takes(runtime, fits):
    gpu = find_gpu("h100")
    peak = memory(point(weights=gpu.memory - 2 * GIB))
    found = problems(replace(rehearsal(record(memory=peak)), runtime_bytes=runtime))
    assert fits == (not found)
    assert fits or ("out of memory" in found[0] and "h100" in found[0])
