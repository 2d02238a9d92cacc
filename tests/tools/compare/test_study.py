"""From run directories to table, differences, search, cost and verdicts."""

from dataclasses import replace

import pytest

from megatron_gspo.tools.compare.run_records import ReportError, read_run
from megatron_gspo.tools.compare.study import differences, read_study, rows, study_of, values
from megatron_gspo.tools.compare.study_plan import load_comparison, report_runs, search_runs
from tests.tools.compare.synthetic import VARIANTS, Course, compared, write_comparison, write_run


def test_run_directories_are_grouped_by_what_they_are(tmp_path):
    study = compared(tmp_path, VARIANTS, seeds=(1, 2))
    assert [group.name for group in study.groups] == [*VARIANTS]
    assert study.baseline == "grpo" and study.seeds == [1, 2]
    assert study.groups[1].overrides["routing.replay"] == "r2"
    assert "optimizer.lr" not in study.groups[0].overrides  # the same in all


def test_groups_that_differ_in_a_key_are_named_by_it(tmp_path):
    fast = Course(overrides={"optimizer.lr": 1e-3})
    study = compared(tmp_path, {"slow": Course(), "fast": fast}, seeds=(1,))
    assert [group.name for group in study.groups] == ["grpo lr=0.0005", "grpo lr=0.001"]


def test_directories_that_cannot_be_compared(tmp_path):
    first = write_run(tmp_path / "a", 1, Course(), steps=5)
    with pytest.raises(ReportError, match="same settings and seed 1 as"):
        study_of([first, write_run(tmp_path / "b", 1, Course(), steps=5)], "")
    with pytest.raises(ReportError, match="is not a run directory"):
        study_of([tmp_path / "nowhere"], "")
    with pytest.raises(ReportError, match="baseline = gspo: is not a variant; set one of grpo"):
        study_of([first], "", baseline="gspo")


def test_the_table_counts_every_run(tmp_path):
    paths = [
        write_run(tmp_path / "1", 1, Course(), steps=10),
        write_run(tmp_path / "2", 2, Course(collapses=4), steps=10),
        write_run(tmp_path / "3", 3, Course(fails=7), steps=10),
    ]
    half = write_run(tmp_path / "4", 4, Course(), steps=10)
    (half / "summary.json").unlink()
    row = rows(study_of([*paths, half], ""), "base")[0]
    assert row.counts == {"finished": 2, "failed": 1, "partial": 1, "missing": 0, "collapsed": 1}
    assert (row.broken, row.converged) == (2, 1)
    assert row.measures["final_accuracy"].count == 3  # the failed one counts with what it had, the open one not


def test_differences_are_paired_and_corrected(tmp_path):
    study = compared(tmp_path, {"grpo": Course(), "gspo": VARIANTS["gspo"], "r2": VARIANTS["grpo_r2"]})
    found = differences(study, "base", "final_accuracy")
    assert set(found) == {"gspo", "grpo_r2"}
    base, other = (values(study, "base", name, "final_accuracy") for name in ("grpo", "gspo"))
    assert found["gspo"].mean == pytest.approx(sum(other[seed] - base[seed] for seed in base) / 3)
    raw = sorted(item.p_t for item in found.values())
    corrected = sorted(item.p_holm for item in found.values())
    assert corrected[0] == pytest.approx(min(1.0, 2 * raw[0]))
    assert corrected[1] == pytest.approx(min(1.0, max(2 * raw[0], raw[1])))


def test_a_comparison_file_is_read_back_with_its_search(tmp_path):
    comparison = load_comparison(write_comparison(tmp_path, seeds=(1, 2)))
    for spec in search_runs(comparison):
        level = 0.7 - 300 * abs(spec.trial["optimizer.lr"] - 5e-4)
        write_run(spec.run_dir, spec.seed, replace(VARIANTS[spec.variant], level=level), steps=10)
    study = read_study(comparison, "command")
    assert {name: values["optimizer.lr"] for name, values in study.chosen.items()} == dict.fromkeys(VARIANTS, 5e-4)
    assert {run.status for run in study.runs} == {"missing"} and len(study.runs) == 24
    runs = report_runs(comparison, study.chosen)
    assert all(run.overrides["optimizer.lr"] == 5e-4 for run in runs if run.setting == "base")


def test_runs_of_a_real_layout_are_read(tmp_path):
    path = write_run(tmp_path / "run", 3, Course(), steps=6)
    run = read_run(path, setting="base", variant="grpo")
    assert len(run.records) == 7 and run.config["algorithm"]["name"] == "grpo"
    assert run.environment["git_revision"] == "abc"
