"""The picture for a README."""

import dataclasses
import xml.etree.ElementTree as ET

from megatron_gspo.tools.compare.glance_picture import glance_picture
from megatron_gspo.tools.compare.study_files import write_report

SVG = "{http://www.w3.org/2000/svg}"


def test_the_file_has_the_charts_side_by_side_and_names_every_variant(report):
    folder, study = report
    root = ET.fromstring((folder / "glance.svg").read_text())
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    boxes = [[float(child.attrib[key]) for key in ("x", "y", "width", "height")] for child in root.findall(f"{SVG}svg")]
    assert len(boxes) == 3, "the synthetic runs have no gradient norm"
    for x, y, wide, high in boxes:
        assert 0 < x < x + wide < width and 0 < y < y + high < height
    for number, (x, y, wide, high) in enumerate(boxes):
        for other_x, other_y, *_ in boxes[:number]:
            assert abs(x - other_x) >= wide or abs(y - other_y) >= high, "charts overlap"
    titles = ["".join(child[0].attrib["aria-label"]) for child in root.findall(f"{SVG}svg")]
    assert titles[0] == "Held-out accuracy"
    legend = root.findall(f"{SVG}text")
    assert [entry.text for entry in legend] == [study.label(group.name) for group in study.groups]
    places = [float(entry.attrib["x"]) for entry in legend]
    assert places == sorted(set(places)) and places[-1] < width


def test_a_long_legend_has_several_lines():
    chart = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 331.2 208.8"></svg>'
    root = ET.fromstring(glance_picture("title", [f"a variant, number {i}" for i in range(12)], [chart] * 2))
    entries = [(float(text.attrib["x"]), float(text.attrib["y"])) for text in root.findall(f"{SVG}text")]
    assert len({y for _, y in entries}) > 1 and len(set(entries)) == 12
    assert max(x for x, _ in entries) < float(root.attrib["viewBox"].split()[2])
    assert all(float(inner.attrib["y"]) > max(y for _, y in entries) for inner in root.findall(f"{SVG}svg"))


def test_its_colours_are_defined_for_light_and_dark(report):
    text = (report[0] / "glance.svg").read_text()
    assert text.count("--v0:") == 2 and "prefers-color-scheme: dark" in text and "var(--v0)" in text
    assert "#a1b2" not in text, "a placeholder was left"


def test_nothing_to_draw_gives_no_picture(report, tmp_path):
    assert glance_picture("title", ["GRPO"], []) == ""
    empty = dataclasses.replace(report[1], runs=[])
    assert "glance.svg" not in [file.name for file in write_report(empty, tmp_path)]
