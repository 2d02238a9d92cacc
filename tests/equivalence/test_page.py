"""docs/equivalence.md lists the layouts of the suite and the measured results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.cases import case_of
from tests.equivalence.layouts import DENSE, MEASURED, MOE
from tests.equivalence.measure import case_for
from tests.equivalence.page import layouts_on, render
from tests.equivalence.table import failures, joined, load_records
from tests.equivalence.tolerances import OF_EXPERTS, TOLERANCES

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
VERSIONS = ["0.16.1", "0.19.2"]


def test_the_page_lists_exactly_the_layouts_of_the_suite():
    text = PAGE.read_text()
    assert layouts_on(text, "Mixture of experts") == [a.name for a in MOE]
    assert layouts_on(text, "Dense") == [a.name for a in DENSE]


def test_the_page_is_what_the_results_say():
    records = load_records()
    assert [r["versions"]["megatron-core"] for r in records] == VERSIONS, "make proof, under each of them"
    assert PAGE.read_text() == render(records), "python -m tests.equivalence.table docs/equivalence.md --render-only"


@pytest.mark.parametrize("index", range(len(VERSIONS)), ids=VERSIONS)
def test_the_results_are_complete_and_within_tolerance(index):
    record = load_records()[index]
    assert failures(record) == []
    for name, arrangements in MEASURED.items():
        rows = record["layouts"][name]
        assert sorted(rows) == sorted(a.name for a in arrangements), name
        for a in arrangements:
            assert rows[a.name]["recompute"] == case_for(name, a).model["recompute"], (name, a.name)
    for model, arrangements in (("moe", MOE), ("dense", DENSE)):
        rows = record["layouts"][model]
        assert list(rows) == [a.name for a in arrangements]
        for a in arrangements:
            row, case = rows[a.name], case_of(a)
            assert set(row["errors"]) == set(TOLERANCES) - (set() if a.moe else set(OF_EXPERTS))
            assert row["processes"] == a.world_size
            assert row["one_by_one"] == case.scored and len(row["distributed_optimizer"]) >= 1


def test_models_that_are_measured_alone_join_the_last_results():
    last = {"layouts": {"moe": 1, "dense": 2}, "defects": {"moe": 3}, "seconds": 10, "date": "2026-11-01"}
    new = {"layouts": {"dense": 4}, "defects": {"dense": 5}, "seconds": 2, "date": "2026-12-01"}
    assert joined(last, new) == {
        "layouts": {"moe": 1, "dense": 4}, "defects": {"moe": 3, "dense": 5}, "seconds": 12, "date": "2026-11-01",
    }  # fmt: skip
