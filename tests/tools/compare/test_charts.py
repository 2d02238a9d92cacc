"""Curves of several runs."""

from pathlib import Path

import pytest

from megatron_gspo.tools.compare import charts
from megatron_gspo.tools.compare.run_records import Run


def test_a_point_against_time_is_the_mean_of_both_coordinates():
    def run(seed, slow, accuracies):
        records = [{"step": i, "eval/accuracy": y, "time/step": slow} for i, y in enumerate(accuracies)]
        return Run("base", "grpo", seed, Path(), "finished", records=records)

    runs = [run(1, 1.0, [0.1, 0.5]), run(2, 3.0, [0.2, 0.6]), run(3, 5.0, [0.3])]
    assert charts._places(runs, "seconds", [0.0, 1.0]) == [3.0, 4.0]  # (1 + 3 + 5) / 3, then (2 + 6) / 2


def test_the_band_of_a_norm_is_that_of_its_logarithms():
    curves = [([1.0, 2.0], [1.0, 1.0]), ([1.0, 2.0], [100.0, 10_000.0]), ([1.0, 2.0], [10.0, 100.0])]
    found = charts._geometric_band(curves)
    assert found.x == [1.0, 2.0] and found.count == [3, 3]
    assert found.mean == pytest.approx([10.0, 10**1.5])  # of the trailing means 0, 3 and 1.5 of log10
    assert all(0 < low < mean < high for low, mean, high in zip(found.low, found.mean, found.high, strict=True))
    assert charts._geometric_band([([1.0], [0.0])]).mean == pytest.approx([0.01])
