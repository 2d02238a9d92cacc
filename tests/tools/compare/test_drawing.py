"""Drawings as SVG: numbers, axes, bands and histograms."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np

from megatron_gspo.tools.compare.drawing import Line, band_panel, histogram_panel
from megatron_gspo.tools.compare.statistics import band


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


def test_wide_bands_do_not_flatten_the_lines():
    curves = ([0.3, 0.5], [0.45, 0.55], [0.6, 0.6])
    wide = band([([0.0, 1.0], curve) for curve in curves])  # t(2) makes the interval at 0 75 points wide
    drawing = band_panel("Accuracy", "step", [Line(0, wide)], percent=True)
    ticks = [float(text.replace("\u2212", "-")) for text in re.findall(r">([-\u2212\d.]+) %<", drawing)]
    assert min(ticks) >= 40 and max(ticks) <= 60  # means 45 and 55, half of their range on each side


def test_small_differences_of_shares_are_drawn_from_zero():
    for last, lowest in ((0.27, 0.0), (0.40, 30.0)):
        line = Line(0, band([([0.0, 1.0], [0.26, last])]))
        drawing = band_panel("Flips", "step", [line], percent=True)
        assert min(float(text) for text in re.findall(r">([\d.]+) %<", drawing)) == lowest


def test_a_log_scale_ends_below_the_smallest_value_and_names_thousands():
    line = Line(0, band([([0.0, 1.0], [2.0, 3000.0])]))
    drawing = band_panel("Gradient norm", "step", [line], log_floor=1e-2)
    ticks = re.findall(r">([\d.]+k?)<", drawing)
    assert "1k" in ticks and "0.1" not in ticks and "1e+03" not in drawing


def test_histogram_counts_what_lies_beyond_its_axis():
    token = np.array([0.0, 5.0, -5.0])
    drawing = histogram_panel("h", token, np.array([0.0]), {"its clip range": (0.2, 0.27)}, 0, 0.5)
    ElementTree.fromstring(drawing)
    assert "its clip range" in drawing and "nan" not in drawing
