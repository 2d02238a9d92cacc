"""The comparison with TRL: rows from the reports of the turns, and the refusal of unequal work."""

from __future__ import annotations

import pytest

from benchmarks.loop_vs_trl import PHASES, TARGETS, check_equal_work, rows_of


def test_rows_from_the_reports_of_the_turns():
    def report(seconds: float) -> dict:
        return {phase: {"seconds": seconds, "cpu_seconds": seconds} for phase in PHASES} | {
            "tokens": 600,
            "steps": 4,
        }

    rows = rows_of("equal", [report(2.0), report(2.0)], [report(3.0), report(3.0)])
    assert [row.name for row in rows] == [f"{name}, equal lengths" for name in PHASES.values()]
    assert (rows[0].ours.median, rows[0].peer.median, rows[0].ratio.median, rows[0].met) == (
        300,
        200,
        1.5,
        True,
    )
    assert (
        rows_of("sampled", [report(2.0)], [report(3.0)])[0].target
        == TARGETS["sampled"]["loop"]
        > rows[0].target
    )


def work(tokens: int, steps: int = 4) -> dict[str, int]:
    return {"steps": steps, "response_tokens": tokens}


def test_equal_lengths_mean_equal_tokens_in_every_turn():
    check_equal_work("equal", [work(24), work(25)], [work(24), work(25)])
    with pytest.raises(ValueError, match=r"^response_tokens: ours did 25, .* 23"):
        check_equal_work("equal", [work(24), work(25)], [work(24), work(23)])


def test_sampled_lengths_agree_in_the_mean_and_steps_always():
    check_equal_work("sampled", [work(80), work(130)], [work(120), work(100)])
    with pytest.raises(ValueError, match=r"^response_tokens: ours did 160, .* 200"):
        check_equal_work("sampled", [work(80), work(80)], [work(100), work(100)])
    with pytest.raises(ValueError, match=r"^steps: ours did 4, .* 3"):
        check_equal_work("sampled", [work(80)], [work(80, steps=3)])
