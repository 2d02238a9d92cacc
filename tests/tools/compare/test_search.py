"""The search over learning rates and clip ranges."""

from pathlib import Path

import pytest

from megatron_gspo.tools.compare.run_records import Run
from megatron_gspo.tools.compare.search import at_edge, choices, table
from megatron_gspo.tools.compare.study_plan import load_comparison
from tests.tools.compare.synthetic import write_comparison


def trial(variant, lr, seed, accuracy, status="finished"):
    records = [{"step": 5, "eval/accuracy": accuracy}] if accuracy is not None else []
    values = {"algorithm.epsilon_low": 0.2, "algorithm.epsilon_high": 0.27, "optimizer.lr": lr}
    return Run("search", variant, seed, Path(), status, records=records, trial=values)


def test_the_search_takes_the_best_mean_over_its_seeds(tmp_path):
    runs = [
        trial("grpo", 1e-4, 101, 0.5), trial("grpo", 1e-4, 102, 0.5),
        trial("grpo", 1e-3, 101, 0.9), trial("grpo", 1e-3, 102, 0.2, "failed"),
        trial("grpo", 3e-3, 101, 0.9), trial("grpo", 3e-3, 102, None, "missing"),
    ]  # fmt: skip
    found = table(runs)
    assert [row.accuracy for row in found] == pytest.approx([0.5, 0.55, None])
    assert [row.chosen for row in found] == [False, True, False]  # 3e-3 lacks a seed
    assert [row.failed for row in found] == [0, 1, 0]
    assert at_edge(found) == []
    assert at_edge(table(runs[:4])) == ["grpo"]


def test_what_was_chosen_reaches_the_variants_that_are_tuned_as_it(tmp_path):
    config = load_comparison(write_comparison(tmp_path)).config
    found = choices(config, table([trial("gspo", 1e-4, 101, 0.5), trial("gspo", 1e-3, 101, 0.6)]))
    assert found["gspo_token"]["optimizer.lr"] == found["gspo"]["optimizer.lr"] == 1e-3
    assert "grpo" not in found
