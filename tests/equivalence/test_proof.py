"""The committed results of the proof are complete and within their tolerances."""

from __future__ import annotations

import json

import pytest

from tests.equivalence.layouts import MEASURED
from tests.equivalence.measure import case_for
from tests.equivalence.proof import RESULTS, failures


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
