"""Tables of one role: figures with units, the largest first, ranks that do the same together."""

from __future__ import annotations

from megatron_gspo.tools.rehearse.records import HostSync
from megatron_gspo.tools.rehearse.rehearsal_tables import (
    same_roles,
)
from tests.tools.rehearse.handmade import record

SITE = ("layer.py:7 forward", "step.py:2 train")


def test_ranks_that_do_the_same_share_a_section():
    syncs = (HostSync("item", SITE, "optimizer", 2),)
    ranks = [record(0), record(1, host_syncs=syncs), record(2, seconds={"build": 9.0})]
    assert [[one.rank for one in same] for same in same_roles(ranks)] == [[0, 2], [1]]
