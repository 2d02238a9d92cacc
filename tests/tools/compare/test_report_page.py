"""The report as a file: it stands alone, tells of every run, and its numbers are the study's."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.tools.compare import charts
from megatron_gspo.tools.compare.drawing import Line, band_panel, histogram_panel
from megatron_gspo.tools.compare.report_page import interval_text
from megatron_gspo.tools.compare.run_records import Run
from megatron_gspo.tools.compare.statistics import Interval, band
from megatron_gspo.tools.compare.study import read_study, rows, study_of
from megatron_gspo.tools.compare.study_files import write_report
from megatron_gspo.tools.compare.study_plan import load_comparison, report_runs, search_runs
from tests.tools.compare.synthetic import VARIANTS, Course, write_comparison, write_run

COMMAND = "megatron-gspo compare compare.yaml"
NAMES = ("grpo", "grpo_r2", "gspo", "gspo_token")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, object]:
    """A comparison in which one GRPO run failed under stress and one run is missing; its folder and its study."""
    folder = tmp_path_factory.mktemp("comparison")
    comparison = load_comparison(write_comparison(folder, seeds=(1, 2), names=NAMES))
    for spec in (*report_runs(comparison, {}), *search_runs(comparison)):
        course = VARIANTS[spec.variant]
        if spec.setting == "high_lr" and spec.variant == "grpo":
            course = replace(course, fails=7)
        if spec.setting == "high_lr" and spec.variant == "gspo_token" and spec.seed == 2:
            continue
        write_run(spec.run_dir, spec.seed, replace(course, overrides={**course.overrides, **spec.overrides}), steps=10)
    study = read_study(comparison, COMMAND)
    write_report(study, comparison.folder)
    return comparison.folder, study


def test_the_page_stands_alone(report):
    page = (report[0] / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", page)
    assert "@import" not in page
    assert len(page) < 1_500_000


def test_every_run_that_did_not_finish_is_named(report):
    page = (report[0] / "report.html").read_text()
    for seed in (1, 2):
        assert f"high_lr grpo seed {seed}: failed after step 7: step 8: the gradient is not finite" in page
    assert "high_lr gspo_token seed 2: not there" in page


def test_the_table_shows_the_studys_numbers(report):
    page, study = (report[0] / "report.html").read_text(), report[1]
    for row in rows(study, "base"):
        assert interval_text(row.measures["final_accuracy"]) in page
    assert COMMAND in page
    assert "optimizer.lr=0.002" in page  # an overridden key is shown
    assert "<td>0.01 / 0.015</td><td>0.0005</td>" in page  # and what is in force though nobody overrode it


def test_every_section_has_something(report):
    page = (report[0] / "report.html").read_text()
    assert "No run recorded" not in page
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', page, flags=re.DOTALL)
    expected = "claims table curves clipping experts ratios response cost stress search settings"
    assert [name for name, _ in sections] == expected.split()
    for name, content in sections:
        if name in ("table", "curves", "clipping", "experts", "ratios", "cost", "stress"):
            assert "<svg" in content, name
    assert dict(sections)["response"].count('class="token') >= 5


def test_drawings_are_xml_and_coloured_by_the_page(report):
    page = (report[0] / "report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) > 20
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    used = set(re.findall(r"var\(--(\w+)\)", page))
    defined = set(re.findall(r"--(\w+):", page))
    assert used <= defined | {"c", "s"}
    assert not re.search(r"#a1b[234]", page)


def test_one_line_a_run(report):
    with (report[0] / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * 4 + 3 * 6
    failed = [line for line in lines if line["status"] == "failed"]
    assert {(line["setting"], line["variant"], line["steps"]) for line in failed} == {("high_lr", "grpo", "7")}
    assert all(line["trial"] for line in lines if line["setting"] == "search")


def test_the_json_holds_everything(report):
    content = json.loads((report[0] / "report.json").read_text())
    assert len(content["runs"]) == 34 and len(content["search"]["trials"]) == 18
    run = content["runs"][0]
    assert run["series"]["eval/accuracy"][0] == [0, 5, 10]
    base = content["settings"][0]
    assert base["rows"][0]["measures"]["final_accuracy"]["count"] == 2
    assert set(base["differences"]["final_accuracy"]) == {*NAMES} - {"grpo"}


def test_few_and_bare_runs_make_a_report_too(tmp_path):
    path = write_run(tmp_path / "run", 1, replace(Course(), flips=0.0), steps=3)
    (path / "summary.json").unlink()
    write_report(study_of([path], COMMAND), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "not over yet" in page and "No run recorded ratios" in page


def test_text_from_runs_is_escaped(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(fails=2), steps=3)
    (path / "failure.json").write_text(json.dumps({"message": "<script>alert(1)</script>"}))
    write_report(study_of([path], "<b>command</b>"), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page and "<b>command" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_numbers_in_a_drawing_are_rounded_and_words_are_not():
    drawing = band_panel("0.12345 and more", "step", [])
    assert ">0.12345 and more<" in drawing
    assert not re.search(r' d="[^"]*\d\.\d\d', drawing)


def test_a_zero_on_a_log_scale_lies_at_the_edge():
    line = Line(0, band([([1.0, 2.0, 3.0], [0.0, 0.1, 0.0])]))
    drawing = band_panel("Clipped", "step", [line], percent=True, log_floor=1e-4)
    point = r" ([\d.]+) ([\d.]+)"
    paths = re.findall(rf'class="v-0"[^>]*>\s*<path d="M{point} L{point} L{point}', drawing)
    heights = [float(value) for value in paths[-1][1::2]]
    assert heights[0] == heights[2] > heights[1]  # down is larger in an SVG


def test_a_point_against_time_is_the_mean_of_both_coordinates():
    def run(seed, slow, accuracies):
        records = [{"step": i, "eval/accuracy": y, "time/step": slow} for i, y in enumerate(accuracies)]
        return Run("base", "grpo", seed, Path(), "finished", records=records)

    runs = [run(1, 1.0, [0.1, 0.5]), run(2, 3.0, [0.2, 0.6]), run(3, 5.0, [0.3])]
    assert charts._places(runs, "seconds", [0.0, 1.0]) == [3.0, 4.0]  # (1 + 3 + 5) / 3, then (2 + 6) / 2


def test_wide_bands_do_not_flatten_the_lines():
    curves = ([0.3, 0.5], [0.45, 0.55], [0.6, 0.6])
    wide = band([([0.0, 1.0], curve) for curve in curves])  # t(2) makes the interval at 0 75 points wide
    drawing = band_panel("Accuracy", "step", [Line(0, wide)], percent=True)
    ticks = [float(text.replace("\u2212", "-")) for text in re.findall(r">([-\u2212\d.]+) %<", drawing)]
    assert min(ticks) >= 40 and max(ticks) <= 60  # means 45 and 55, half of their range on each side


def test_histogram_counts_what_lies_beyond_its_axis():
    token = np.array([0.0, 5.0, -5.0])
    drawing = histogram_panel("h", token, np.array([0.0]), {"its clip range": (0.2, 0.27)}, 0, 0.5)
    ElementTree.fromstring(drawing)
    assert "its clip range" in drawing and "nan" not in drawing


@pytest.mark.parametrize(
    "found, text",
    [(None, "-"), (Interval(0.5, None, None, 1), "50.0"), (Interval(0.612, 0.58, 0.644, 5), "61.2 [58.0, 64.4]")],
)
def test_intervals_as_text(found, text):
    assert interval_text(found) == text
