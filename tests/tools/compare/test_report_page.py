"""The report as one file: every run is in it, and its numbers are the study's."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape

import pytest

from megatron_gspo.tools.compare.report_page import interval_text
from megatron_gspo.tools.compare.statistics import Interval
from megatron_gspo.tools.compare.study import rows, study_of
from megatron_gspo.tools.compare.study_files import write_report
from tests.tools.compare.conftest import COMMAND
from tests.tools.compare.synthetic import VARIANTS, Course, compared, write_run


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
    assert "high_lr gspo_token seed 2: missing" in page


def test_the_table_shows_the_studys_numbers(report):
    page, study = (report[0] / "report.html").read_text(), report[1]
    for row in rows(study, "base"):
        assert interval_text(row.measures["final_accuracy"]) in page
    assert COMMAND in page
    assert "optimizer.lr=0.002" in page  # an overridden key is shown
    assert "<td>0.01 / 0.015</td><td>0.0005</td>" in page  # and values that no override set


def test_every_section_has_something(report):
    page = (report[0] / "report.html").read_text()
    assert "No run recorded" not in page
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', page, flags=re.DOTALL)
    expected = "glance table curves clipping experts ratios response claims cost stress search settings"
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


def test_few_and_bare_runs_make_a_report_too(tmp_path):
    path = write_run(tmp_path / "run", 1, replace(Course(), flips=0.0), steps=3)
    (path / "summary.json").unlink()
    write_report(study_of([path], COMMAND), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 incomplete" in page and "No run recorded ratios" in page


def test_text_from_runs_is_escaped(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(fails=2), steps=3)
    (path / "failure.json").write_text(json.dumps({"message": "<script>alert(1)</script>"}))
    write_report(study_of([path], "<b>command</b>"), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page and "<b>command" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize(
    "found, text",
    [(None, "-"), (Interval(0.5, None, None, 1), "50.0"), (Interval(0.612, 0.58, 0.644, 5), "61.2 [58.0, 64.4]")],
)
def test_intervals_as_text(found, text):
    assert interval_text(found) == text


def test_labels_are_shown_as_they_are(report, tmp_path):
    """Whatever matplotlib, SVG or HTML would make of them."""
    labels = ["costs $5 and $6", "$x$ \\frac{ a_b_c^d", "</text><script>alert(1)</script>", "_hidden & b < c"]
    groups = [replace(group, label=label) for group, label in zip(report[1].groups, labels, strict=True)]
    page, *_ = write_report(replace(report[1], groups=groups, title=labels[2]), tmp_path)
    text = page.read_text()
    assert text.count("<script>") == 1, "the page's own"
    drawn = unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", text)))
    for label in labels:
        assert label.split()[0] in drawn
    root = ElementTree.parse(tmp_path / "glance.svg").getroot()
    assert [entry.text for entry in root.findall("{http://www.w3.org/2000/svg}text")] == labels


def test_verdicts_are_about_these_runs(tmp_path):
    study = compared(tmp_path, {"grpo": VARIANTS["grpo"], "gspo": VARIANTS["gspo"]}, seeds=(1, 2))
    page, *_ = write_report(study, tmp_path / "out")
    text = page.read_text()
    assert "reproduced" not in text
    assert "They are of the model nowhere, the task ?, 10 rollout batches, 2 seeds." in text
