"""The tables of docs/scaling.md, by hand; `test_write_page.py` compares the page itself with the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from benchmarks.real_size_page import OPTIONS, fitted_rates, newest_rows, real_size
from megatron_gspo.tools.plan.assumptions import Assumptions


def row(what: str, ours: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "ours": ours, "target": 1.2, "unit": "times", "parts": {}, "met": ours <= 1.2} | more


def test_the_plan_has_the_rates_of_the_newest_result():
    """To their two digits; `fitted_rates` says what to set them to after another measurement."""
    for name, rate in fitted_rates(newest_rows()[0]).items():
        assert getattr(Assumptions(), name) == pytest.approx(rate, rel=0.03), name


def test_rates_by_hand():
    """3 us to receive a token with 384 ids and 1 without: 2,000 ns of 384 ids. 0.7 and 0.5 us in two phases."""
    kind = "8 responses of 9 tokens {} routes over 8 ranks: a rank's host, per million tokens"
    rows = {kind.format(name): row("", 1, parts={"receive and check, s": receive, "pack, s": pack, "collect, s": 0.1})
            for name, receive, pack in (("with", 3.0, 0.6), ("without", 1.0, 0.4))}  # fmt: skip
    assert fitted_rates(rows) == pytest.approx({
        "receive_us_token": 1.0, "receive_ns_id": 2000 / 384, "prepare_us_token": 0.5, "prepare_ns_id": 200 / 384,
    })  # fmt: skip


def test_the_page_names_the_options_of_its_table():
    assert OPTIONS in " ".join((ROOT / "docs" / "scaling.md").read_text().split())


def test_the_newest_row_counts_and_gets_what_was_before(tmp_path: Path):
    for name, rows in {
        "2026-01-01-real-size": [row("a save, 1.08 GiB: 1", 1.0), row("a load", 1.1)],
        "2026-01-02-limited-disk": [row("a save, 1.08 GiB: 1", 1.3)],
        "2026-01-03-sandbox": [row("a load", 9.0)],
        "2026-01-03-before": [{"what": "a save, *: 1", "before": 3.0}],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    rows, files = newest_rows(tmp_path)
    assert {what: (found["ours"], found.get("before")) for what, found in rows.items()} == {
        "a save, 1.08 GiB: 1": (1.3, 3.0), "a load": (1.1, None)
    }  # fmt: skip
    assert files == ["2026-01-01-real-size.json", "2026-01-02-limited-disk.json", "2026-01-03-before.json"]


def test_a_line_of_several_rows():
    """Two of three loads; the other lines' measurements are absent."""
    rows = {f"checkpoint load, ranks: {n}": row("", n, before=before) for n, before in ((1.0, None), (1.5, 7.0))}
    found = real_size(rows, ["2026-01-01-real-size.json"]).splitlines()
    assert found[2:4] == ["| loads | 1; 1.5 times | 1.2, **missed** by 1.5 | -; 7 |", ""]
    assert found[5] == "[2026-01-01-real-size](../benchmarks/results/2026-01-01-real-size.json)."
    rows["checkpoint load, ranks: 3"] = row("", 1, unit="s")
    with pytest.raises(ValueError, match="loads: rows of s, times"):
        real_size(rows, [])
