"""Tables of one role: figures with units, the largest first, ranks that do the same together."""

from __future__ import annotations

from megatron_gspo.tools.rehearse.records import Collective, HostCopy, HostSync
from megatron_gspo.tools.rehearse.rehearsal_tables import (
    collective_rows,
    copy_rows,
    flop_rows,
    role_tables,
    same_roles,
    sync_rows,
)
from tests.tools.rehearse.handmade import record

SITE = ("layer.py:7 forward", "step.py:2 train")


def test_events_are_rows():
    one = record(
        collectives=(Collective("allreduce", "tp", (0, 1), "float32", 2048, SITE, "optimizer"),)
        * 3,
        host_syncs=(
            HostSync("item", SITE, "optimizer", 2),
            HostSync("nonzero", SITE, "build", 1200),
        ),
        host_copies=(
            HostCopy(2**20, False, True, SITE, "build", 1),
            HostCopy(8, True, False, SITE, "build", 4),
        ),
        flops={"optimizer": {"mm": 10**12, "attention": 2 * 10**12, "none": 0}},
    )
    assert collective_rows(one)[1:] == [["optimizer", "tp", "allreduce", "float32", "3", "6.0 KiB"]]
    assert sync_rows(one)[1:] == [
        ["optimizer", "2", "item", SITE[0]],
        ["build", "1,200", "nonzero", SITE[0]],
    ]
    assert copy_rows(one)[1:] == [
        ["build", "4", "8 bytes", "no", SITE[0]],
        ["build", "1", "1.0 MiB", "yes", SITE[0]],
    ]
    assert flop_rows(one)[1:] == [["optimizer", "attention", "2.000"], ["optimizer", "mm", "1.000"]]
    assert len(role_tables(one)) == 5
    assert len(role_tables(record())) == 1  # memory


def test_ranks_that_do_the_same_share_a_section():
    syncs = (HostSync("item", SITE, "optimizer", 2),)
    ranks = [record(0), record(1, host_syncs=syncs), record(2, seconds={"build": 9.0})]
    assert [[one.rank for one in same] for same in same_roles(ranks)] == [[0, 2], [1]]
