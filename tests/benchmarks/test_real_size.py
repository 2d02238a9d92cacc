"""The real-size benchmark: its figures, by hand, and a quick run of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from benchmarks.real_size import EXPERTS, LAYERS, TOP, Figure, Response, response_body, table


def test_a_target_is_the_most_that_is_allowed():
    assert Figure("time", 0.25, 0.25, "s").met and not Figure("time", 0.26, 0.25, "s").met
    assert Figure("time", 0.5, 0.25, "s").to_json() == {
        "what": "time", "ours": 0.5, "target": 0.25, "unit": "s", "met": False
    }  # fmt: skip
    assert "| time | 0.5 s | <= 0.25 | NO |" in table([Figure("time", 0.5, 0.25, "s")])


def test_a_response_becomes_a_checked_sample_and_a_batch():
    response = Response(5)
    body = response_body(5)
    sample = response.sample(body)
    assert sample.tokens.tolist()[1:] == json.loads(body)["output_ids"]
    assert sample.routed_experts.shape == (5, LAYERS, TOP) and sample.routed_experts.max() < EXPERTS
    assert response.packed(sample).routed_experts.shape == (6, LAYERS, TOP)


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    command = [sys.executable, "benchmarks/real_size.py", "--quick", "--json", str(tmp_path / "found.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 8 + 15 and all({"what", "ours", "target", "met"} <= set(row) for row in rows)
