"""The pure parts of the benchmarks: spreads, ratios, rows and the turns of two programs."""

from __future__ import annotations

import sys

import pytest

from benchmarks.common import (
    Seconds,
    Spread,
    interleave,
    rate_row,
    ratios,
    time_row,
)
from benchmarks.turns import Worker, take_turns


def test_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


def test_ratios_are_taken_turn_by_turn():
    """A machine twice as slow in the second and third turn: medians over all turns would give
    2, the turns give 1.
    """
    assert ratios([1.0, 2.0, 2.0], [1.0, 2.0, 2.0]).median == 1.0
    assert ratios([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.5, 3)


def test_time_rows_want_to_be_low_and_rates_high():
    slow = [Seconds(2.0, 1.0)] * 3
    fast = [Seconds(1.0, 1.0)] * 3
    row = time_row("step", "a", slow, fast, peer_name="p", target=1.5)
    assert (row.ratio.median, row.cpu_ratio.median, row.ours.median, row.met) == (
        2.0,
        1.0,
        2000.0,
        False,
    )
    assert time_row("step", "a", fast, slow, peer_name="p", target=0.5).met is True
    turn = {"amount": 100.0, "seconds": 4.0, "cpu_seconds": 2.0}
    row = rate_row(
        "loop", "b", [turn], [turn | {"seconds": 5.0}], unit="tokens/s", peer_name="p", target=1.3
    )
    assert (row.ours.median, row.ratio.median, row.cpu_ratio.median, row.met) == (
        25.0,
        1.25,
        1.0,
        False,
    )


def test_contestants_run_in_turns_in_alternating_order():
    calls = []
    taken = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1
    )
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert {name: len(turns) for name, turns in taken.items()} == {"a": 3, "b": 3}


def test_repeats_stop_when_the_time_is_over_but_not_before_three():
    taken = interleave({"a": lambda: None}, repeats=100, warmup=0, seconds=-1.0)
    assert len(taken["a"]) == 3


WORKER = """
import json, sys
for i in range(9):
    print("chatter", flush=True)
    print("@@ " + json.dumps({"segment": i}), flush=True)
    if not sys.stdin.readline():
        break
"""


def test_programs_take_turns():
    command = [sys.executable, "-c", WORKER]
    with Worker("a", command, limit=30) as a, Worker("b", command, limit=30) as b:
        reports = take_turns([a, b], 2)
    assert reports == [[{"segment": 1}, {"segment": 2}]] * 2


def test_a_program_that_dies_is_told_with_its_last_words():
    command = [sys.executable, "-c", "import sys; sys.exit('out of luck')"]
    with (
        Worker("peer", command, limit=30) as worker,
        pytest.raises(RuntimeError, match="(?s)peer ended early.*luck"),
    ):
        worker.report()


def test_a_program_that_hangs_is_given_up():
    command = [sys.executable, "-c", "input()"]
    with (
        Worker("peer", command, limit=0.2) as worker,
        pytest.raises(RuntimeError, match="longer than"),
    ):
        worker.report()
