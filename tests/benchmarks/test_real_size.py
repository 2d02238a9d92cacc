"""The real-size benchmark: its figures, by hand, and a quick run of it."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from itertools import chain

import pytest

from benchmarks import weight_links
from benchmarks.common import ROOT
from benchmarks.limited_disk import limited_disk
from benchmarks.real_size import Result, table
from benchmarks.real_size_data import measure_ranks
from benchmarks.real_size_figure import Figure, NotMeasuredError
from benchmarks.real_size_page import LINES
from benchmarks.real_size_response import EXPERTS, LAYERS, TOP, Response, response_body


def test_a_target_is_the_most_that_is_allowed():
    assert Figure("time", 0.25, 0.25, "s").met and not Figure("time", 0.26, 0.25, "s").met
    assert Figure("time", 0.5, 0.25, "s").to_json() == {
        "what": "time", "ours": 0.5, "target": 0.25, "unit": "s", "parts": {}, "before": None, "met": False
    }  # fmt: skip
    assert "| time | 0.5 s | <= 0.25 | NO |" in table([Figure("time", 0.5, 0.25, "s")])


def test_a_quick_run_has_its_own_time_as_a_row():
    figures = Result([Figure("time", 0.5, 0.25, "s")], {}, {"a": 400.0, "b": 90.0}).with_own_time()
    assert figures[1].ours == 490.0 and figures[1].parts == {"a, s": 400.0, "b, s": 90.0} and not figures[1].met


def test_a_response_becomes_a_checked_sample_and_a_batch():
    response = Response(5)
    body = response_body(5)
    sample = response.sample(body)
    assert sample.tokens.tolist()[1:] == json.loads(body)["output_ids"]
    assert sample.routed_experts.shape == (5, LAYERS, TOP) and sample.routed_experts.max() < EXPERTS
    assert response.packed(sample).routed_experts.shape == (6, LAYERS, TOP)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tensor", [(2, 1), (4, 2)])
def test_ranks_of_a_small_batch(ranks, tensor):
    """Tokens and routes of a share, by hand: 16 responses of 9 tokens to a prompt of one."""
    for found in chain.from_iterable(measure_ranks(ranks, 16, 9, routes=True, turns=2, tensor=tensor)):
        assert found.tokens == 16 * 10 and found.share >= 16 * (10 * 8 + 9 * (LAYERS * TOP + 1 + 4))
        assert set(found.seconds) == {
            "receive and check", "plan and move", "pack", "collect", "metrics", "advantages"
        }  # fmt: skip


@pytest.mark.slow
def test_an_update_over_limited_links():
    if reason := weight_links.reason_against():
        pytest.skip(reason)
    with weight_links.limited_links(2, 2) as links:
        one, two = (links.cost_of(weight_links.Update(2, sources, 0.5, receiver=True, repeats=1)) for sources in (1, 2))
        before = links.cost_of(weight_links.Update(2, 1, 0.5, one_group_each=True, repeats=1))
    buckets = weight_links.BUCKETS
    assert (one.broadcasts, two.broadcasts, before.broadcasts) == (buckets, buckets, 2 * buckets / 4)
    assert all(2**20 < cost.sent < 1.2 * 2**20 for cost in (one, two, before))  # 0.5 MiB to each of two servers


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    command = [sys.executable, "benchmarks/real_size.py", "--quick", "--json", str(tmp_path / "found.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    weights = 0 if "weight_updates" in found["not_measured"] else 4
    disks = 0 if "limited_disk_rates" in found["not_measured"] else 6
    node = 0 if "weights_of_a_node" in found["not_measured"] else 1
    assert len(found["rows"]) == 3 + 2 + 8 + weights + 15 + disks + 1 + node + 3 + 1
    assert all({"what", "ours", "target", "met"} <= set(row) for row in found["rows"])
    assert sum(found["seconds"].values()) == found["rows"][-1]["ours"]
    if not found["not_measured"]:
        names = [row["what"] for row in found["rows"]]
        assert all(fnmatch.filter(names, pattern) for line in LINES for pattern in line.rows)


@pytest.mark.slow
def test_a_limited_disk_has_the_writes_of_its_processes(tmp_path):
    text = "import os, sys; from pathlib import Path; from benchmarks.limited_disk import join\n"
    text += "join(Path(sys.argv[1])); file = open(sys.argv[2], 'wb', 0)\n"
    text += "file.write(bytes(2**20)); os.fsync(file.fileno())"
    try:
        with limited_disk(tmp_path, 10**9) as group:
            subprocess.run([sys.executable, "-c", text, group, tmp_path / "file"], cwd=ROOT, check=True)
            counted = (group / "blkio.throttle.io_service_bytes").read_text()
    except NotMeasuredError as reason:
        pytest.skip(str(reason))
    assert int(counted.split()[-1]) >= 2**20 and not group.exists()


def test_an_error_on_a_limited_disk_is_not_a_disk_without_a_limit(tmp_path):
    try:
        with pytest.raises(FileNotFoundError), limited_disk(tmp_path, 10**9):
            (tmp_path / "absent").read_text()
    except NotMeasuredError as reason:
        pytest.skip(str(reason))
