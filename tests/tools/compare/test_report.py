"""The report as one file: every run is in it, and its numbers are the study's."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape

import pytest

from megatron_gspo.tools.compare.finished_runs import study_of
from megatron_gspo.tools.compare.report import perturbations, write_report
from megatron_gspo.tools.compare.run_records import figures
from megatron_gspo.tools.compare.statistics import Interval, interval_text
from megatron_gspo.tools.compare.study import PRIMARY, mean_value
from tests.tools.compare.conftest import COMMAND, NAMES
from tests.tools.compare.synthetic import Course, compared, write_run


def test_the_page_stands_alone(report):
    page = (report[0] / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", page)
    assert "@import" not in page
    assert len(page) < 1_500_000


def test_every_run_that_did_not_finish_is_named(report):
    page = (report[0] / "report.html").read_text()
    assert "grpo_r2 seed 3: failed after step 7: step 8: the gradient is not finite" in page
    assert "gspo_token seed 3: missing" in page
    assert "2 finished, 1 failed" in page and "2 finished, 1 missing" in page


def test_the_table_shows_the_studys_numbers(report):
    page, study = (report[0] / "report.html").read_text(), report[1]
    for name in NAMES:
        assert interval_text(mean_value(study, name, PRIMARY)) in page
    assert COMMAND in page
    assert "training.steps=30" in page  # an overridden key is shown
    assert "<td>0.01 / 0.015</td><td>0.0005</td>" in page  # and values that no override set


def test_every_section_has_something(report):
    page = (report[0] / "report.html").read_text()
    assert "No run recorded" not in page
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, flags=re.DOTALL))
    assert list(sections) == ["results", "curves", "cost", "settings"]
    assert sections["results"].count("<svg") == 2 and sections["curves"].count("<svg") == 10
    assert sections["cost"].count("<tr>") == 1 + len(NAMES)


def test_drawings_are_xml_and_coloured_by_the_page(report):
    page = (report[0] / "report.html").read_text()
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(drawing)
    used = set(re.findall(r"var\(--(\w+)\)", page))
    defined = set(re.findall(r"--(\w+):", page))
    assert used <= defined | {"c"}
    assert not re.search(r"#a1b[234]", page)


def test_the_cost_of_a_variant_by_hand(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(), steps=3)
    records = [
        {"step": 1, "time/step": 99.0, "time/train": 99.0},
        {
            "step": 2,
            "time/step": 2.0,
            "time/train": 1.0,
            "time/generate": 0.4,
            "routing/replay_bytes": 640,
            "perf/peak_memory_gib": 1.0,
        },
        {
            "step": 3,
            "time/step": 3.0,
            "time/train": 2.0,
            "time/generate": 0.6,
            "time/evaluate": 1.0,
            "routing/replay_bytes": 1408,
            "perf/peak_memory_gib": 1.5,
        },
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page, _ = write_report(study_of([path], COMMAND), tmp_path / "out")
    section = page.read_text().split('<section id="cost">')[1].split("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", section)
    # (2 + 3 - 1) / 2: the first step and the evaluation are left out
    assert cells == ["2.000", "baseline", "0.500", "-", "1.500", "-", "1.250", "1.0 KiB", "-"]


def test_one_line_a_run(report):
    with (report[0] / "runs.csv").open() as file:
        lines = {(line["variant"], line["seed"]): line for line in csv.DictReader(file)}
    assert len(lines) == 3 * 4
    assert lines["grpo_r2", "3"]["status"] == "failed" and lines["grpo_r2", "3"]["steps"] == "7"
    assert lines["gspo_token", "3"]["status"] == "missing"
    run = next(run for run in report[1].runs if run.name == "gspo seed 2")
    assert float(lines["gspo", "2"]["final_accuracy"]) == pytest.approx(
        figures(run).final_accuracy, rel=1e-5
    )


def test_perturbed_routers_are_named(tmp_path, report):
    assert perturbations(report[1]) == []
    noise = {"router_noise.engines": "both", "router_noise.strength": 0.5}
    study = compared(tmp_path, {"grpo": Course(overrides=noise)}, seeds=(1,))
    page, _ = write_report(study, tmp_path / "out")
    words = "which replay undoes by construction: routers of both engines, strength 0.5."
    assert words in page.read_text()


def test_few_and_bare_runs_make_a_report_too(tmp_path):
    path = write_run(tmp_path / "run", 1, replace(Course(), flips=0.0), steps=3)
    (path / "summary.json").unlink()
    write_report(study_of([path], COMMAND), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 incomplete" in page and "Experts changed" not in page


def test_text_from_runs_is_escaped(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(fails=2), steps=3)
    (path / "failure.json").write_text(json.dumps({"message": "<script>alert(1)</script>"}))
    write_report(study_of([path], "<b>command</b>"), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page and "<b>command" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize(
    "found, text",
    [
        (None, "-"),
        (Interval(0.5, None, None, 1), "50.0"),
        (Interval(0.612, 0.58, 0.644, 5), "61.2 [58.0, 64.4]"),
    ],
)
def test_intervals_as_text(found, text):
    assert interval_text(found) == text


def test_labels_are_shown_as_they_are(report, tmp_path):
    """Whatever matplotlib, SVG or HTML would make of them."""
    labels = ["costs $5 and $6", "$x$ \\frac{ a_b_c^d", "</g><script>0</script>", "_hidden & b < c"]
    variants = [
        replace(variant, label=label)
        for variant, label in zip(report[1].variants, labels, strict=True)
    ]
    page, _ = write_report(replace(report[1], variants=variants, title=labels[2]), tmp_path)
    text = page.read_text()
    assert text.count("<script>") == 1, "the page's own"
    drawn = unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", text)))
    for label in labels:
        assert label.split()[0] in drawn
