"""Counts of host synchronizations, copies and findings."""

import pytest

from megatron_gspo.tools.rehearse.host_log import HostLog


def test_calls_from_one_place_are_counted() -> None:
    log = HostLog()
    for _ in range(3):
        log.sync("item")
    log.sync("item")
    assert [sync.count for sync in log.syncs] == [3, 1]
    assert log.syncs[0].where[0].endswith("test_calls_from_one_place_are_counted")


def test_phases_and_kinds_of_copies_are_apart() -> None:
    log = HostLog()
    for phase, pinned in (("build", True), ("build", False), ("optimizer", True)):
        log.phase = phase
        log.copy(8, pinned=pinned, blocking=not pinned)
    assert [(copy.phase, copy.bytes, copy.pinned) for copy in log.copies] == [
        ("build", 8, True), ("build", 8, False), ("optimizer", 8, True)
    ]  # fmt: skip


def test_an_unknown_kind_of_finding_is_refused() -> None:
    with pytest.raises(AssertionError):
        HostLog().find("typo", "text")
