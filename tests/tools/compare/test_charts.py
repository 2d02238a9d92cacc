"""Curves of several runs."""

from pathlib import Path

from megatron_gspo.tools.compare import charts
from megatron_gspo.tools.compare.run_records import Run


def test_a_point_against_time_is_the_mean_of_both_coordinates():
    def run(seed, slow, accuracies):
        records = [{"step": i, "eval/accuracy": y, "time/step": slow} for i, y in enumerate(accuracies)]
        return Run("base", "grpo", seed, Path(), "finished", records=records)

    runs = [run(1, 1.0, [0.1, 0.5]), run(2, 3.0, [0.2, 0.6]), run(3, 5.0, [0.3])]
    assert charts._places(runs, "seconds", [0.0, 1.0]) == [3.0, 4.0]  # (1 + 3 + 5) / 3, then (2 + 6) / 2
