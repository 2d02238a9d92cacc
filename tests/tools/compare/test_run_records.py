"""What is read from a run directory, against numbers worked by hand."""

from pathlib import Path

import pytest

from megatron_gspo.tools.compare.run_records import (
    Run,
    figures,
    mean_of,
    read_run,
    seconds_by_step,
    series,
    tokens_by_step,
)
from tests.tools.compare.synthetic import write_run


def run_of(accuracies):
    records = [{"step": step, "eval/accuracy": value} for step, value in accuracies]
    return Run("grpo", 1, Path(), "finished", records=records)


def test_status_of_a_directory(tmp_path):
    def status(name):
        return read_run(tmp_path / name, variant="grpo", seed=1).status

    write_run(tmp_path / "whole", [0.2, 0.5])
    write_run(tmp_path / "failed", [0.2, 0.5], error="step 2: no memory")
    write_run(tmp_path / "killed", [0.2, 0.5])
    (tmp_path / "killed" / "summary.json").unlink()
    assert status("whole") == "finished"
    assert status("failed") == "failed"
    assert status("killed") == "partial"
    assert status("nowhere") == "missing"
    assert read_run(tmp_path / "failed", variant="grpo", seed=1).message == "step 2: no memory"


def test_figures_by_hand():
    numbers = figures(run_of([(0, 0.2), (10, 0.6), (20, 0.4), (40, 0.5)]))
    assert (numbers.start_accuracy, numbers.best_accuracy) == (0.2, 0.6)
    assert numbers.final_accuracy == 0.5
    assert not numbers.collapsed


def test_collapse_is_half_of_ones_own_best():
    assert figures(run_of([(0, 0.2), (5, 0.6), (10, 0.29)])).collapsed
    assert not figures(run_of([(0, 0.2), (5, 0.6), (10, 0.31)])).collapsed
    # never learnt anything: not a collapse
    assert not figures(run_of([(0, 0.0), (5, 0.0)])).collapsed


def test_axes_by_hand():
    records = [
        {"step": 0, "eval/accuracy": 0.1, "time/step": 5.0, "time/evaluate": 4.5},
        {"step": 1, "perf/tokens": 100.0, "time/step": 2.0, "reward/mean": 1.0},
        {
            "step": 2,
            "perf/tokens": 50.0,
            "time/step": 4.0,
            "time/evaluate": 1.0,
            "time/checkpoint": 0.5,
            "eval/accuracy": 0.3,
            "reward/mean": None,
        },
    ]
    run = Run("grpo", 1, Path(), "finished", records=records)
    assert series(run, "eval/accuracy") == {0.0: 0.1, 2.0: 0.3}
    assert tokens_by_step(run) == {0.0: 0.0, 1.0: 100.0, 2.0: 150.0}
    assert seconds_by_step(run) == pytest.approx({0.0: 0.5, 1.0: 2.5, 2.0: 5.0})
    assert mean_of(run, "reward/mean") == 1.0  # null is no value
