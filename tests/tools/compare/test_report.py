"""The report as one file: every run is in it, and its numbers are the study's."""

import csv
import re
from html import unescape
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.report import write_report
from megatron_gspo.tools.compare.statistics import interval_text
from megatron_gspo.tools.compare.study import PRIMARY, Study, mean_value, read_study
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs
from tests.tools.compare.synthetic import COMMAND, write_comparison, write_run

ERROR = "step 2: <b>the gradient</b> is not finite"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Study]:
    """A comparison in which one run failed and one is missing; its folder and its study."""
    folder = tmp_path_factory.mktemp("comparison")
    comparison = load_comparison(write_comparison(folder))
    for spec in planned_runs(comparison):
        if (spec.variant, spec.seed) == ("grpo_r2", 3):
            write_run(spec.run_dir, [0.2, 0.5], error=ERROR)
        elif (spec.variant, spec.seed) != ("gspo", 3):
            write_run(spec.run_dir, [0.2, 0.4, 0.5 + 0.1 * spec.seed])
    study = read_study(comparison, COMMAND)
    write_report(study, folder / "out")
    return folder / "out", study


def test_the_page_stands_alone_and_names_every_run_that_did_not_finish(report):
    page = (report[0] / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "3 variants, 3 seeds, 9 runs (7 finished, 1 failed, 1 missing)" in page
    text = unescape(page)
    assert f"grpo_r2 seed 3: failed after step 1: {ERROR}" in text
    assert ERROR not in page  # text from runs is escaped
    assert "gspo seed 3: missing" in page


def test_the_table_shows_the_studys_numbers(report):
    page = (report[0] / "report.html").read_text()
    for name in ("grpo", "grpo_r2", "gspo"):
        assert interval_text(mean_value(report[1], name, PRIMARY)) in page
    assert COMMAND in page
    assert "training.steps=30" in page
    assert "algorithm.epsilon_low=0.01" in page


def test_one_line_a_run(report):
    with (report[0] / "runs.csv").open() as file:
        lines = {(line["variant"], line["seed"]): line for line in csv.DictReader(file)}
    assert len(lines) == 9
    assert lines["grpo_r2", "3"]["status"] == "failed"
    assert lines["grpo_r2", "3"]["steps"] == "1"
    assert lines["gspo", "3"]["status"] == "missing"
    line = lines["gspo", "2"]
    assert (line["final_accuracy"], line["tokens"], line["seconds"]) == ("0.7", "300", "6")
    assert (line["reward/mean"], line["routing/flip_rate"]) == ("0.55", "")


def test_one_line_an_evaluation(report):
    """A step of these runs has 100 tokens; the values are rounded to six digits."""
    with (report[0] / "accuracy.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["variant"] == "gspo"]
    of_second = [line for line in lines if line["seed"] == "2"]
    assert [line["step"] for line in of_second] == ["0", "1", "2"]
    assert [line["tokens"] for line in of_second] == ["100", "200", "300"]
    assert of_second[-1]["accuracy"] == "0.7"
    assert {line["seed"] for line in lines} == {"1", "2"}


def test_rewards_that_are_no_accuracies_are_told(report, tmp_path: Path):
    assert "no accuracies" not in (report[0] / "report.html").read_text()
    comparison = load_comparison(write_comparison(tmp_path))
    for spec in planned_runs(comparison):
        write_run(spec.run_dir, [-2.0, -1.5, 0.5])
    write_report(read_study(comparison, COMMAND), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("held-out rewards are beyond 0 to 1") == 1
