"""The committed results of the proof are complete and within their tolerances."""

from __future__ import annotations

import json

import pytest

from tests.equivalence.layouts import MEASURED
from tests.equivalence.measure import case_for
from tests.equivalence.proof import RESULTS, failures, merged, summary


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_the_committed_results_have_every_layout_within_tolerance(version: str) -> None:
    record = json.loads((RESULTS / f"equivalence-{version}.json").read_text())
    assert record["versions"]["megatron-core"] == version
    assert failures(record) == []
    for model, arrangements in MEASURED.items():
        results = record["layouts"][model]
        assert sorted(results) == sorted(arrangement.name for arrangement in arrangements), model
        for arrangement in arrangements:
            result = results[arrangement.name]
            assert result["processes"] == arrangement.world_size
            assert result["recompute"] == case_for(model, arrangement).model["recompute"]


def test_an_error_beyond_its_tolerance_is_reported() -> None:
    results = {"tp2": {"errors": {"gradient": [3e-5, "layer 1"], "loss": [1e-7, "gspo"]}}}
    record = {"layouts": {"moe": results}}
    assert failures(record) == ["moe tp2: gradient is off by 3.0e-05 (layer 1)"]
    assert "| gradient | 3.0e-05 | 1e-05 |" in summary(record)


def test_models_that_are_measured_alone_replace_their_previous_results() -> None:
    previous = {
        "layouts": {"moe": 1, "dense": 2},
        "defects": {"moe": 3},
        "seconds": 10,
        "date": "2026-11-01",
    }
    record = {"layouts": {"dense": 4}, "defects": {"dense": 5}, "seconds": 2, "date": "2026-12-01"}
    assert merged(previous, record) == {
        "layouts": {"moe": 1, "dense": 4},
        "defects": {"moe": 3, "dense": 5},
        "seconds": 12,
        "date": "2026-11-01",
    }
