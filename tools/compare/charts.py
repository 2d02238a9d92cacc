"""The report's charts: means over the seeds of each variant with their bands, as SVG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_gspo.tools.compare.run_records import (
    Run,
    seconds_by_step,
    series,
    tokens_by_step,
)
from megatron_gspo.tools.compare.statistics import Band, band
from megatron_gspo.tools.compare.study import Study
from megatron_gspo.tracking.plots import smooth, svg_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#c2410c #d99a00 #0f8a5f #1d5fd1 #7c3aed #0891b2 #be185d #64748b "
    "#4d7c0f #7f1d1d #312e81 #a16207 #111827 #84cc16 #d946ef #115e59"
).split()
_POINTS = 60  # of a curve; more make the page larger, not clearer
_WINDOW = 5  # steps of the trailing mean
_SIZE = (3.4, 2.4)  # inches
_STYLE: dict[Any, Any] = {
    **svg_style("comparison"),
    "font.size": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": "#d9dee6",
    "grid.linewidth": 0.6,
}


@dataclass(frozen=True)
class Metric:
    """A metric that has a chart.

    linear_below: a log scale that is linear from 0 to this value.
    """

    name: str
    title: str
    percent: bool = True
    linear_below: float | None = None


ACCURACY = Metric("eval/accuracy", "Held-out accuracy")
BY_STEP = (
    Metric("reward/mean", "Training reward", percent=False),
    Metric("effective_sample_size", "Effective sample size"),
    Metric("clip_fraction/tokens", "Clipped tokens", linear_below=0.01),
    Metric("kl/old_policy", "KL(old, current), nats per token", percent=False),
    Metric("entropy", "Policy entropy, nats per token", percent=False),
    Metric("grad_norm", "Gradient norm", percent=False, linear_below=1.0),
    Metric("routing/flip_rate", "Experts changed by the updates"),
    Metric("routing/rollout_flip_rate", "Experts that differ, rollout and training"),
)


def colour_of(study: Study, variant: str) -> str:
    names = [each.name for each in study.variants]
    return COLOURS[names.index(variant) % len(COLOURS)]


def charts(study: Study) -> list[str]:
    """Held-out accuracy by step, tokens and time; the other metrics that any run has by step."""
    accuracy = {
        variant.name: band(
            [series(run, ACCURACY.name) for run in study.runs_of(variant.name)], _POINTS
        )
        for variant in study.variants
    }
    drawn = [curve_chart(study, ACCURACY, "step", accuracy)]
    axes: dict[str, Callable[[Run], Mapping[float, float]]] = {
        "tokens": tokens_by_step,
        "training time, s": seconds_by_step,
    }
    for label, axis in axes.items():
        along_axis = {}
        for name, curve in accuracy.items():
            by_step = [axis(run) for run in study.runs_of(name)]
            along_axis[name] = replace(curve, x=mean_positions(by_step, curve.x))
        drawn.append(curve_chart(study, ACCURACY, label, along_axis))
    for metric in BY_STEP:
        bands = {
            variant.name: band(
                [trailing_mean(series(run, metric.name)) for run in study.runs_of(variant.name)],
                _POINTS,
            )
            for variant in study.variants
        }
        drawn.append(curve_chart(study, metric, "step", bands))
    return [chart for chart in drawn if chart]


def trailing_mean(curve: Mapping[float, float]) -> dict[float, float]:
    return dict(zip(curve, smooth(list(curve.values()), _WINDOW), strict=True))


def mean_positions(by_step: Sequence[Mapping[float, float]], steps: Sequence[float]) -> list[float]:
    """Where steps lie on an axis: the mean over the runs that came so far."""
    positions = []
    for step in steps:
        reached = [run[step] for run in by_step if step in run]
        positions.append(sum(reached) / len(reached))
    return positions


def curve_chart(study: Study, metric: Metric, xlabel: str, bands: Mapping[str, Band]) -> str:
    """Means with bands, as SVG; empty text where no variant has a point."""
    shown = {name: curve for name, curve in bands.items() if curve.x}
    if not shown:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    scale = 100.0 if metric.percent else 1.0
    title = metric.title + (", %" if metric.percent else "")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axis = figure.subplots()
        for name, curve in shown.items():
            _draw_band(axis, curve, scale, colour_of(study, name))
        if metric.linear_below is not None:
            axis.set_yscale("symlog", linthresh=metric.linear_below * scale)
        _limit_height(axis, list(shown.values()), scale)
        axis.set_xlabel(xlabel)
        axis.set_title("\n".join(textwrap.wrap(title, 34)), fontweight="bold")
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()


def _draw_band(axis: Axes, curve: Band, scale: float, colour: str) -> None:
    """Dashed from the last x that all seeds reached."""
    low, mean, high = ([scale * y for y in edge] for edge in (curve.low, curve.mean, curve.high))
    whole = sum(count == max(curve.count) for count in curve.count)
    axis.fill_between(curve.x[:whole], low[:whole], high[:whole], color=colour, alpha=0.14, lw=0)
    axis.plot(curve.x[:whole], mean[:whole], color=colour, lw=1.7)
    axis.plot(curve.x[whole - 1 :], mean[whole - 1 :], color=colour, lw=1.1, ls="dashed")


def _limit_height(axis: Axes, bands: Sequence[Band], scale: float) -> None:
    """Show every mean, and at most half as much again of the bands: with few seeds they are wide
    and would flatten the lines.
    """
    means = [y for curve in bands for y in curve.mean]
    room = 0.5 * (max(means) - min(means))
    bottom = max(min(y for curve in bands for y in curve.low), min(means) - room)
    top = min(max(y for curve in bands for y in curve.high), max(means) + room)
    margin = 0.05 * (top - bottom)
    if margin > 0:
        axis.set_ylim(scale * (bottom - margin), scale * (top + margin))
