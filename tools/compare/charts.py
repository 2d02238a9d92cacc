"""The report's charts as inline SVG.

A variant's marks carry the class `v-N`, which the page's legend switches.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_gspo.tools.compare.run_records import Run, against, positions, series
from megatron_gspo.tools.compare.statistics import Band, Difference, Interval, band
from megatron_gspo.tools.compare.study import PRIMARY, Study, differences, mean_value
from megatron_gspo.tools.svg_panel import FAINT, TEXT, panel, short, variant_colour
from megatron_gspo.tracking.plots import smooth
from megatron_gspo.tracking.run_directory import evenly_spaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 60  # of a curve; more make the page larger, not clearer
_SMALL_DIFFERENCE = 0.12  # of the largest value


@dataclass(frozen=True)
class Metric:
    """A metric that has a chart.

    window: steps of the trailing mean. log_floor: a log scale that draws smaller values, 0 too, at
    this height. geometric: means are of the logarithms, so that a single step with a norm of a
    thousand doesn't hide all others.
    """

    name: str
    title: str
    percent: bool = True
    window: int = 5
    log_floor: float | None = None
    geometric: bool = False


@dataclass(frozen=True)
class Line:
    """One variant's band in a chart.

    number: its colour; ends: where single runs stopped with an error.
    """

    number: int
    band: Band
    ends: Sequence[tuple[float, float]] = ()


ACCURACY = Metric("eval/accuracy", "Held-out accuracy", window=1)
AXES = {
    "samples": "samples (responses)",
    "tokens": "tokens",
    "seconds": "training time, s",
}
BY_STEP = (
    Metric("reward/mean", "Training reward", percent=False),
    Metric("effective_sample_size", "Effective sample size"),
    Metric("clip_fraction/tokens", "Clipped tokens", log_floor=1e-4),
    Metric("kl/old_policy", "KL(old, current), nats per token", percent=False),
    Metric("entropy", "Policy entropy, nats per token", percent=False),
    Metric("grad_norm", "Gradient norm", percent=False, log_floor=1e-2, geometric=True),
    Metric("routing/flip_rate", "Experts changed by the updates"),
    Metric("routing/rollout_flip_rate", "Experts that differ, rollout and training"),
)


def interval_charts(study: Study, colours: Mapping[str, int]) -> list[str]:
    """Accuracy at the end of each variant, and its difference from the baseline; the highest
    first.
    """
    ends = {variant.name: mean_value(study, variant.name, PRIMARY) for variant in study.variants}
    charts = [
        interval_chart(study, colours, ends, "Accuracy at the end", "%, mean and 95 % t-interval")
    ]
    gaps = differences(study, PRIMARY)
    title = f"Difference from {study.label(study.baseline)}"
    words = "points, paired by seed, 95 % t-interval"
    charts.append(interval_chart(study, colours, gaps, title, words, zero=True))
    return [chart for chart in charts if chart]


def accuracy_charts(study: Study, colours: Mapping[str, int]) -> list[str]:
    """Held-out accuracy against each axis of progress."""
    charts = []
    for axis, label in AXES.items():
        lines = []
        for variant in study.variants:
            runs = study.runs_of(variant.name)
            by_step = _band_of(runs, ACCURACY)
            failed = [against(run, ACCURACY.name, axis) for run in runs if run.status == "failed"]
            ends = [(x[-1], y[-1]) for x, y in failed if x]
            curve = replace(by_step, x=mean_positions(runs, axis, by_step.x))
            lines.append(Line(colours[variant.name], curve, ends))
        charts.append(curve_chart(ACCURACY, label, lines))
    return [chart for chart in charts if chart]


def metric_charts(study: Study, colours: Mapping[str, int]) -> list[str]:
    """The other metrics by step, as far as any run has them."""
    charts = []
    for metric in BY_STEP:
        lines = [
            Line(colours[variant.name], _band_of(study.runs_of(variant.name), metric))
            for variant in study.variants
        ]
        charts.append(curve_chart(metric, "step", lines))
    return [chart for chart in charts if chart]


def mean_positions(runs: Sequence[Run], axis: str, steps: Sequence[float]) -> list[float]:
    """Where steps lie on an axis: the mean over the runs that came so far."""
    known = [by_step for run in runs if (by_step := positions(run, axis))]
    means = []
    for step in steps:
        reached = [
            np.interp(step, list(by_step), list(by_step.values()))
            for by_step in known
            if max(by_step) >= step
        ]
        means.append(float(np.mean(reached)))
    return means


def _band_of(runs: Sequence[Run], metric: Metric) -> Band:
    """A metric's band over seeds, of trailing means at no more than _POINTS steps."""
    floor = metric.log_floor or 0.0
    curves = []
    for run in runs:
        steps, heights = series(run, metric.name)
        if metric.geometric:
            heights = [math.log(max(height, floor)) for height in heights]
        means = smooth(heights, metric.window)
        chosen = evenly_spaced(range(len(steps)), _POINTS)
        curves.append(([steps[i] for i in chosen], [means[i] for i in chosen]))
    result = band(curves, _POINTS)
    if not metric.geometric:
        return result
    return replace(
        result,
        mean=[math.exp(height) for height in result.mean],
        low=[math.exp(height) for height in result.low],
        high=[math.exp(height) for height in result.high],
    )


def interval_chart(
    study: Study,
    colours: Mapping[str, int],
    intervals: Mapping[str, Interval | Difference | None],
    title: str,
    xlabel: str,
    *,
    zero: bool = False,
) -> str:
    """One dot and interval a variant; empty text without any."""
    known = {name: values for name, values in intervals.items() if values is not None}
    if not known:
        return ""
    names = sorted(known, key=lambda name: known[name].mean, reverse=True)
    with panel(title, size=(3.4, 0.9 + 0.26 * len(names))) as (axis, output):
        for height, name in enumerate(names):
            values = known[name]
            colour = variant_colour(colours[name])
            group = f"v-{colours[name]}"
            if values.low is not None and values.high is not None:
                ends = [100 * values.low, 100 * values.high]
                axis.plot(ends, [height, height], color=colour, lw=2, gid=group)
            axis.plot([100 * values.mean], [height], "o", color=colour, ms=5, gid=group)
        if zero:
            axis.axvline(0, color=FAINT, lw=1)
        axis.set_yticks(range(len(names)), [_wrapped(study.label(name)) for name in names])
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlabel(xlabel)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=TEXT)
    return output[0]


def curve_chart(metric: Metric, xlabel: str, lines: Sequence[Line]) -> str:
    """Means with bands; empty text where no line has a point."""
    if not any(line.band.x for line in lines):
        return ""
    scale = 100.0 if metric.percent else 1.0
    with panel(metric.title) as (axis, output):
        for line in lines:
            if line.band.x:
                _draw_band(axis, line, scale, metric.log_floor)
        if metric.log_floor is None:
            _set_height(axis, lines, scale, shares=metric.percent)
        else:
            axis.set_yscale("log")
            smallest = min(low for line in lines for low in line.band.low)
            top = 2 * scale if metric.percent else None
            axis.set_ylim(bottom=max(smallest, metric.log_floor) * scale * 0.8, top=top)
        axis.set_xlabel(xlabel)
        _set_ticks(axis, metric)
    return output[0]


def _draw_band(axis: Axes, line: Line, scale: float, floor: float | None) -> None:
    colour = variant_colour(line.number)
    group = f"v-{line.number}"
    least = -math.inf if floor is None else floor * scale
    low = np.maximum(np.asarray(line.band.low) * scale, least)
    mean = np.maximum(np.asarray(line.band.mean) * scale, least)
    high = np.maximum(np.asarray(line.band.high) * scale, least)
    x = np.asarray(line.band.x)
    whole = np.asarray(line.band.count) == max(line.band.count)
    axis.fill_between(x, low, high, where=whole, color=colour, alpha=0.14, lw=0, gid=group)
    axis.plot(x[whole], mean[whole], color=colour, lw=1.7, gid=group)
    if not whole.all():  # from the last x that all seeds reached
        start = max(int(whole.sum()) - 1, 0)
        axis.plot(x[start:], mean[start:], color=colour, lw=1.1, ls=(0, (2, 2)), gid=group)
    for end_x, end_y in line.ends:
        axis.plot([end_x], [max(end_y * scale, least)], "x", color=colour, ms=6, mew=1.6, gid=group)


def _set_height(axis: Axes, lines: Sequence[Line], scale: float, *, shares: bool) -> None:
    """The axis shows every mean, and at most half as much again of the bands: with few seeds they
    are wide.

    shares: that differ little are drawn from 0, which does not exaggerate the differences.
    """
    means = [height for line in lines for height in line.band.mean]
    edges = [height for line in lines for height in (*line.band.low, *line.band.high)]
    lowest = min(means)
    highest = max(means)
    room = 0.5 * (highest - lowest)
    bottom = max(min(edges), lowest - room)
    top = min(max(edges), highest + room)
    if lowest >= 0:  # shares, rewards and times have nothing to show below 0
        bottom = max(bottom, 0.0)
    if shares and highest - lowest < _SMALL_DIFFERENCE * highest:
        bottom = 0.0
    if top > bottom:
        margin = 0.05 * (top - bottom)
        axis.set_ylim(scale * (bottom - margin), scale * (top + margin))
    elif bottom == 0.0:
        axis.set_ylim(bottom=0.0)


def _set_ticks(axis: Axes, metric: Metric) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if metric.log_floor is not None:
        axis.yaxis.set_major_locator(LogLocator(numticks=6))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="y", which="minor", length=0)
    unit = " %" if metric.percent else ""
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{short(value)}{unit}"))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(FuncFormatter(short))


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, 24)[:2])
