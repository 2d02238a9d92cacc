"""What is read from a run directory, against numbers worked by hand."""

import pytest

from megatron_gspo.tools.compare.run_records import (
    Run,
    against,
    area,
    figures,
    mean_of,
    read_run,
    seconds_per_step,
)
from tests.tools.compare.synthetic import Course, write_run

CONFIG = {"rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2}}


def run_of(accuracies, **more):
    records = [{"step": step, "eval/accuracy": value} for step, value in accuracies]
    return Run("grpo", 1, None, "finished", config=CONFIG, records=records, **more)


def test_status_of_a_directory(tmp_path):
    def status(name):
        return read_run(tmp_path / name, variant="grpo").status

    write_run(tmp_path / "whole", 1, Course(), steps=5)
    write_run(tmp_path / "failed", 1, Course(fails=3), steps=5)
    write_run(tmp_path / "killed", 1, Course(), steps=5)
    (tmp_path / "killed" / "summary.json").unlink()
    assert [status(name) for name in ("whole", "failed", "killed", "nowhere")] == [
        "finished",
        "failed",
        "partial",
        "missing",
    ]
    failed = read_run(tmp_path / "failed", variant="grpo")
    assert failed.message == "step 4: the gradient is not finite"
    assert failed.seed == 1  # from its config


def test_half_a_line_and_half_a_summary_are_no_result(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(), steps=5)
    (path / "summary.json").write_text('{"exit": "fini')
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    run = read_run(path, variant="grpo")
    assert run.status == "partial"
    assert [record["step"] for record in run.records] == [0, 1, 2, 3, 4, 5]


def test_figures_by_hand():
    found = figures(run_of([(0, 0.2), (10, 0.6), (20, 0.4), (40, 0.5)]))
    assert (found.start_accuracy, found.best_accuracy, found.final_accuracy) == (0.2, 0.6, 0.5)
    # trapezia 10 * 0.4, 10 * 0.5, 20 * 0.45 over 40
    assert found.mean_accuracy == pytest.approx((4 + 5 + 9) / 40)
    assert not found.collapsed


def test_collapse_is_half_of_ones_own_best():
    assert figures(run_of([(0, 0.2), (5, 0.6), (10, 0.29)])).collapsed
    assert not figures(run_of([(0, 0.2), (5, 0.6), (10, 0.31)])).collapsed
    assert not figures(
        run_of([(0, 0.0), (5, 0.0)])
    ).collapsed  # never learnt anything: not a collapse


def test_area_of_few_points():
    assert area([], []) is None
    assert area([3], [0.5]) == 0.5


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
    run = Run("grpo", 1, None, "finished", config=CONFIG, records=records)
    assert against(run, "eval/accuracy", "samples") == ([0.0, 16.0], [0.1, 0.3])
    assert against(run, "eval/accuracy", "tokens")[0] == [0.0, 150.0]
    assert against(run, "eval/accuracy", "seconds")[0] == pytest.approx([0.5, 5.0])
    assert seconds_per_step(run) == pytest.approx(2.5)  # 4 - 1 - 0.5 of the second step alone
    assert against(run, "reward/mean", "tokens") == ([100.0], [1.0])
    assert mean_of(run, "reward/mean") == 1.0  # null is no value
    with pytest.raises(ValueError, match="axis"):
        against(run, "reward/mean", "steps")
