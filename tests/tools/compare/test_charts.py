"""Curves of several runs, and what a drawing shows of them."""

import re
from pathlib import Path

import pytest

from megatron_gspo.tools.compare import charts
from megatron_gspo.tools.compare.charts import Line, Metric, curve_chart
from megatron_gspo.tools.compare.run_records import Run
from megatron_gspo.tools.compare.statistics import band

SHARE = Metric("a", "Share")


def test_a_point_against_time_is_the_mean_of_both_coordinates():
    def run(seed, slow, accuracies):
        records = [
            {"step": i, "eval/accuracy": y, "time/step": slow} for i, y in enumerate(accuracies)
        ]
        return Run("grpo", seed, Path(), "finished", records=records)

    runs = [run(1, 1.0, [0.1, 0.5]), run(2, 3.0, [0.2, 0.6]), run(3, 5.0, [0.3])]
    places = charts.mean_positions(runs, "seconds", [0.0, 1.0])
    assert places == [3.0, 4.0]  # (1 + 3 + 5) / 3, then (2 + 6) / 2


def test_the_band_of_a_norm_is_that_of_its_logarithms():
    def run(norms):
        records = [{"step": i, "grad_norm": norm} for i, norm in enumerate(norms, start=1)]
        return Run("grpo", 1, Path(), "finished", records=records)

    norm = next(metric for metric in charts.BY_STEP if metric.name == "grad_norm")
    found = charts._band_of([run([1.0, 1.0]), run([100.0, 10_000.0]), run([10.0, 100.0])], norm)
    assert found.x == [1.0, 2.0] and found.count == [3, 3]
    # Of the trailing means 0, 3 and 1.5 of log10.
    assert found.mean == pytest.approx([10.0, 10**1.5])
    assert all(
        0 < low < mean < high
        for low, mean, high in zip(found.low, found.mean, found.high, strict=True)
    )
    assert charts._band_of([run([0.0])], norm).mean == pytest.approx([0.01])


def test_numbers_in_a_drawing_are_rounded_and_words_are_not():
    line = Line(0, band([([0.0, 1.0], [1 / 3, 1 / 7])]))
    drawing = curve_chart(Metric("a", "0.12345 and more"), "step", [line])
    assert ">0.12345 and more<" in drawing
    assert not re.search(r' d="[^"]*\d\.\d\d', drawing)


def test_no_point_is_no_drawing():
    assert curve_chart(SHARE, "step", [Line(0, band([]))]) == ""


def test_a_zero_on_a_log_scale_lies_at_the_edge():
    line = Line(0, band([([1.0, 2.0, 3.0], [0.0, 0.1, 0.0])]))
    drawing = curve_chart(Metric("a", "Clipped", log_floor=1e-4), "step", [line])
    point = r" ([\d.]+) ([\d.]+)"
    paths = re.findall(rf'class="v-0"[^>]*>\s*<path d="M{point} L{point} L{point}', drawing)
    heights = [float(value) for value in paths[-1][1::2]]
    assert heights[0] == heights[2] > heights[1]  # down is larger in an SVG


def test_wide_bands_do_not_flatten_the_lines():
    curves = ([0.3, 0.5], [0.45, 0.55], [0.6, 0.6])
    # t(2): the interval at 0 is 75 points wide.
    wide = band([([0.0, 1.0], curve) for curve in curves])
    drawing = curve_chart(SHARE, "step", [Line(0, wide)])
    ticks = [
        float(text.replace("\u2212", "-")) for text in re.findall(r">([-\u2212\d.]+) %<", drawing)
    ]
    # Means 45 and 55, half of their range on each side.
    assert min(ticks) >= 40 and max(ticks) <= 60


def test_small_differences_of_shares_are_drawn_from_zero():
    for last, lowest in ((0.27, 0.0), (0.40, 30.0)):
        line = Line(0, band([([0.0, 1.0], [0.26, last])]))
        drawing = curve_chart(SHARE, "step", [line])
        assert min(float(text) for text in re.findall(r">([\d.]+) %<", drawing)) == lowest


def test_a_log_scale_ends_below_the_smallest_value_and_names_thousands():
    line = Line(0, band([([0.0, 1.0], [2.0, 3000.0])]))
    metric = Metric("a", "Gradient norm", percent=False, log_floor=1e-2)
    drawing = curve_chart(metric, "step", [line])
    ticks = re.findall(r">([\d.]+k?)<", drawing)
    assert "1k" in ticks and "0.1" not in ticks and "1e+03" not in drawing
