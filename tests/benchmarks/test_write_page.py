"""Pages with figures have those of the committed result."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import missed, missed_by, notes, rows_of, select
from benchmarks.result_files import read_latest
from benchmarks.write_page import PAGE, SHOWN, compact_table, filled, page, pages, stale
from tests.support.benchmark_results import result, row

ROOT = Path(__file__).parents[2]


def test_the_pages_of_this_repository_show_the_committed_result():
    """`python benchmarks/write_page.py` writes them."""
    wanted = pages(ROOT, read_latest())
    assert PAGE in wanted
    assert stale(ROOT, wanted) == []


def test_every_pattern_of_the_page_selects_rows():
    rows = rows_of(read_latest())
    assert all(select(rows, [pattern]) for pattern in SHOWN)


def test_a_row_of_a_page_by_hand():
    shown = compact_table([row("time", 1.21, benchmark="step", target=1.1)]).splitlines()[2]
    assert shown.startswith("| time | peer | 1.21 (") and shown.endswith("| <= 1.1: NO |")


ROWS = (row("time", 1.21, benchmark="step", target=1.1, note="busy"), row("bytes", 0.5, benchmark="log", target=0.5),
        row("rate", 2.0, benchmark="log", better="higher"))  # fmt: skip


def test_the_page_has_tables_misses_commands_and_machine():
    text = page(result(*ROWS))
    assert "Targets: 1 of 2 reached." in text
    assert "- step: time, against peer: 1.21 for <= 1.1, 10 % off (busy)" in text
    assert "Fast CPU, 2 cores, Linux, load 0.1 at the start, 2026-01-02, 2 minutes." in text
    assert "python 3.11, torch 2, verl 9." in text
    assert "| step | `python benchmarks/step.py` | 1 | 0 of 1 |" in text


def test_misses_count_from_the_target_and_of_what_it_asks():
    absolute = row(ratio=0.3, target=0.25, absolute=True)
    assert missed_by(absolute) == pytest.approx(0.2)
    assert missed([absolute])[0] == "bench: a, against peer: 0.3 ms for <= 0.25, 20 % off"
    assert missed_by(row(ratio=0.5, target=2.0, better="higher")) == pytest.approx(0.75)
    assert missed_by(row(ratio=0.5, target=0.0)) == 0.5


def test_notes_are_told_once():
    assert notes([row(), row("b")]) == []
    assert notes([row(note="busy"), row("b", note="busy")]) == ["busy.", ""]
    rows = [row(note="busy"), row("b", note="idle"), row("c", note="busy"), row("a", note="busy")]
    assert notes(rows) == ["- a; c: busy", "- b: idle", ""]
    assert notes([*rows, row("d", note="busy")])[0] == "- a; c and 1 more: busy"


def test_blocks_are_filled_and_stay_filled():
    text = "before\n<!-- benchmarks: log/b*; step/* -->\nold\n\n<!-- /benchmarks -->\nafter\n"
    once = filled(text, result(*ROWS))
    assert compact_table([ROWS[1], ROWS[0]]) in once and "old" not in once
    assert once.startswith("before\n") and once.endswith("\nafter\n")
    assert filled(once, result(*ROWS)) == once
    changed = result(row("time", 9.0, benchmark="step"), ROWS[1])
    assert filled(once, changed) != once


def test_a_pattern_without_a_row_is_refused():
    assert select(ROWS, ["log/*", "*/rate/peer"]) == list(ROWS[1:])
    with pytest.raises(ValueError, match="no row of the result fits 'log/gone'"):
        filled("<!-- benchmarks: log/gone -->\n<!-- /benchmarks -->", result(*ROWS))


def test_pages_without_blocks_are_left_alone(tmp_path):
    for name, text in {"README.md": "plain", "benchmarks/README.md": "plain", "docs/a.md": "", "docs/b.md": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs/b.md").write_text("<!-- benchmarks: log/* -->\n<!-- /benchmarks -->\n")
    wanted = pages(tmp_path, result(*ROWS))
    assert list(wanted) == [PAGE, Path("docs/b.md")]
    assert stale(tmp_path, wanted) == list(wanted)
    with pytest.raises(ValueError, match="docs/b.md: no row of the result fits"):
        pages(tmp_path, result(row()))
