"""The printed report has the verdict, what was compared and what cannot be known."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.tools.rehearse.records import Collective, HostSync
from megatron_gspo.tools.rehearse.rehearsal_tables import same_roles
from megatron_gspo.tools.rehearse.summary import CANNOT_PROVE, FailedRank
from megatron_gspo.tools.rehearse.text_report import whole_report
from tests.tools.rehearse.handmade import record, rehearsal

SUM = Collective("allreduce", "tp", (0, 1), "float32", 8, ("layer.py:1 forward",), "build")


def test_a_passing_rehearsal():
    report = whole_report(
        rehearsal(
            record(0, world=2, collectives=(SUM,), notes=("two of eight micro-batches",)),
            record(1, world=2, collectives=(SUM,)),
        )
    )
    assert report.startswith(
        "config.yaml, world 2, TP2: rehearsed on a CPU.\n\nNothing was found that would"
    )
    assert "same sizes" not in report and "with the same dtypes and sizes: tp (2 calls)." in report
    assert "- two of eight micro-batches" in report
    assert all(line in report for line in CANNOT_PROVE)


def test_a_failing_rehearsal_names_the_problems_first():
    other = replace(SUM, bytes=4)
    failing = rehearsal(
        record(0, world=2, collectives=(SUM,)), record(1, world=2, collectives=(other,))
    )
    report = whole_report(replace(failing, failed=(FailedRank(7, "unknown operation aten.fft"),)))
    assert (
        "2 problems that would stop or corrupt a run:\n- rank 7: unknown operation aten.fft\n-"
        " bytes: gr" in report
    )
    assert "Nothing was found" not in report and "same order" not in report


def test_ranks_that_do_the_same_share_a_section():
    syncs = (HostSync("item", ("layer.py:7 forward",), "optimizer", 2),)
    ranks = [record(0), record(1, host_syncs=syncs), record(2, seconds={"build": 9.0})]
    assert [[each.rank for each in same] for same in same_roles(ranks)] == [[0, 2], [1]]
