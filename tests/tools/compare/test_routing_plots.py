"""Means by layer over the records of several runs."""

import json
from types import SimpleNamespace

import pytest

from megatron_gspo.tools.compare.routing_plots import layers_of


def run(folder, *records):
    folder.mkdir()
    (folder / "routing.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return SimpleNamespace(run_dir=folder)


def test_means_over_steps_and_runs(tmp_path):
    first = run(
        tmp_path / "a",
        {"step": 1, "flip_rate": [0.1, 0.3], "entropy": None, "load": [[0.5, 0.5], [0.9, 0.1]]},
        {"step": 2, "flip_rate": [None, 0.5], "entropy": [1.0, 2.0], "load": None},
    )
    record = {"step": 1, "flip_rate": [0.3, 0.5], "entropy": None, "load": [[0.7, 0.3], [0.3, 0.7]]}
    second = run(tmp_path / "b", record)
    found = layers_of("gspo", [first, second])
    assert found.variant == "gspo"
    assert found.figures == {"flip_rate": pytest.approx([0.2, 0.4]), "entropy": [1.0, 2.0]}
    assert found.largest_load == pytest.approx([0.6, 0.8])


def test_without_records_there_is_nothing(tmp_path):
    assert layers_of("gspo", [SimpleNamespace(run_dir=tmp_path)]) is None
