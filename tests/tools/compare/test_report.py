"""The report as one file: every run is in it, and its numbers are the study's."""

import base64
import csv
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.charts import Metric, curve_chart, mean_positions
from megatron_gspo.tools.compare.report import write_report
from megatron_gspo.tools.compare.statistics import Interval, band, interval_text
from megatron_gspo.tools.compare.study import PRIMARY, Study, mean_value, read_study
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs
from tests.tools.compare.synthetic import COMMAND, study_of, write_comparison, write_run

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


def images(page: str) -> list[str]:
    return [base64.b64decode(image).decode() for image in re.findall(r"base64,([^\"]+)", page)]


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


def test_what_no_run_recorded_has_no_chart(report):
    drawn = images((report[0] / "report.html").read_text())
    for drawing in drawn:
        ElementTree.fromstring(drawing)
    titles = ("accuracy", "accuracy", "accuracy", "reward", "Clipped tokens")
    assert len(drawn) == len(titles)
    assert all(title in drawing for title, drawing in zip(titles, drawn, strict=True))


def test_a_comparison_that_has_not_run_makes_a_report_too(tmp_path):
    study = study_of(tmp_path, {"grpo": [], "gspo": [0.5]})
    page, _ = write_report(replace(study, runs=[]), tmp_path)
    assert "No run recorded a metric" in page.read_text()


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


@pytest.mark.parametrize(
    "values, text",
    [
        (None, "-"),
        (Interval(0.5, None, None, 1), "50.0"),
        (Interval(0.612, 0.58, 0.644, 5), "61.2 [58.0, 64.4]"),
    ],
)
def test_intervals_as_text(values, text):
    assert interval_text(values) == text


def test_a_point_against_time_is_the_mean_of_both_coordinates():
    seconds = [{0.0: 1.0, 1.0: 2.0}, {0.0: 3.0, 1.0: 6.0}, {0.0: 5.0}]
    assert mean_positions(seconds, [0.0, 1.0]) == [3.0, 4.0]


def test_wide_bands_do_not_flatten_the_lines(report):
    # t(2): the interval at 0 is 75 points wide.
    wide = band([{0.0: 0.3, 1.0: 0.5}, {0.0: 0.45, 1.0: 0.55}, {0.0: 0.6, 1.0: 0.6}])
    drawing = curve_chart(report[1], Metric("a", "Share"), "step", {"grpo": wide})
    # The labels at the y axis end the drawing's text.
    ticks = [float(text) for text in re.findall(r">(\d\d\.?\d*)<", drawing)]
    # Means 45 and 55, half of their range on each side.
    assert ticks
    assert min(ticks) >= 39 and max(ticks) <= 61
