"""The report's charts as inline SVG. A variant's marks carry the class `v-N`, which the page's legend switches."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_gspo.tools.compare.statistics import Band
from megatron_gspo.tools.svg_panel import FAINT, TEXT, panel, phase_colour, short, variant_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN_RANGE = "its clip range"
_SMALL_DIFFERENCE = 0.12  # of the largest value


@dataclass(frozen=True)
class Line:
    """One variant's band in a panel. number: its colour; ends: where single runs stopped with an error."""

    number: int
    band: Band
    ends: list[tuple[float, float]] = field(default_factory=list)


def band_panel(
    title: str, xlabel: str, lines: Sequence[Line], *, percent: bool = False, log_floor: float | None = None
) -> str:
    """Means with bands. log_floor: a log scale that draws smaller values, 0 too, at this height."""
    with panel(title) as (axis, output):
        scale = 100.0 if percent else 1.0
        for line in lines:
            _draw_band(axis, line, scale, log_floor)
        if log_floor is not None:
            axis.set_yscale("log")
            smallest = min((low for line in lines for low in line.band.low), default=log_floor)
            axis.set_ylim(bottom=max(smallest, log_floor) * scale * 0.8, top=2 * scale if percent else None)
        else:
            _set_height(axis, lines, scale, shares=percent)
        axis.set_xlabel(xlabel)
        _tidy(axis, log=log_floor is not None, percent=percent)
    return output[0]


def histogram_panel(
    title: str,
    token: np.ndarray,
    sequence: np.ndarray,
    bands: Mapping[str, tuple[float, float]],
    number: int,
    reach: float,
) -> str:
    """Ratios of tokens (outline) and sequences (filled) as densities on a log count axis, with clip bands.

    bands: label and (epsilon_low, epsilon_high); that of `OWN_RANGE` is shaded. reach: half the width of
    the x axis in log-ratio; what lies beyond is counted in the outermost bin.
    """
    with panel(title) as (axis, output):
        edges = np.linspace(-reach, reach, 61)
        for values, kind in ((token, "step"), (sequence, "stepfilled")):
            share = np.histogram(np.clip(values, -reach, reach), bins=edges)[0] / max(len(values), 1)
            axis.stairs(
                100 * share,
                np.exp(edges),
                fill=kind == "stepfilled",
                color=variant_colour(number) if kind == "stepfilled" else TEXT,
                alpha=0.55 if kind == "stepfilled" else 1.0,
                lw=1.1,
                gid=f"v-{number}",
                label="sequences" if kind == "stepfilled" else "tokens",
            )
        for label, (low, high) in bands.items():
            if label == OWN_RANGE:
                axis.axvspan(1 - low, 1 + high, color=FAINT, alpha=0.18, lw=0, label=label)
            else:
                axis.axvline(1 - low, color=FAINT, lw=0.9, ls=":", label=label)
                axis.axvline(1 + high, color=FAINT, lw=0.9, ls=":")
        axis.set_yscale("log")
        axis.set_xlim(np.exp(-reach), np.exp(reach))
        axis.set_xlabel("ratio, new policy / old policy")
        axis.legend(fontsize=8, frameon=False, loc="upper right", handlelength=1.4, borderaxespad=0.1)
        _tidy(axis, log=True, percent=True)
    return output[0]


def cost_panel(labels: Sequence[str], parts: Sequence[tuple[int, Sequence[float]]]) -> str:
    """Stacked bars, one a variant: seconds a step of each phase, as (colour's number, one value a variant)."""
    height = 0.75 + 0.36 * len(labels)
    with panel("", size=(4.4, height)) as (axis, output):
        left = np.zeros(len(labels))
        for number, seconds in parts:
            axis.barh(range(len(labels)), seconds, left=left, height=0.68, color=phase_colour(number), lw=0)
            left += np.asarray(seconds)
        axis.set_yticks(range(len(labels)), [_wrapped(label) for label in labels])
        axis.invert_yaxis()
        axis.set_xlabel("seconds a step")
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=TEXT)
    return output[0]


def interval_panel(title: str, xlabel: str, rows: Sequence[tuple[int, str, Any]], *, zero: bool = False) -> str:
    """One dot and interval a row (number, label, something with mean, low and high)."""
    with panel(title, size=(3.4, 0.9 + 0.26 * len(rows))) as (axis, output):
        for place, (number, _, found) in enumerate(rows):
            if found is None:
                continue
            colour = variant_colour(number)
            if found.low is not None:
                axis.plot([100 * found.low, 100 * found.high], [place, place], color=colour, lw=2, gid=f"v-{number}")
            axis.plot([100 * found.mean], [place], "o", color=colour, ms=5, gid=f"v-{number}")
        if zero:
            axis.axvline(0, color=FAINT, lw=1)
        axis.set_yticks(range(len(rows)), [_wrapped(label) for _, label, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(xlabel)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=TEXT)
    return output[0]


def _set_height(axis: Axes, lines: Sequence[Line], scale: float, *, shares: bool) -> None:
    """The axis shows every mean, and at most half as much again of the bands: with few seeds they are wide.

    shares: that differ little are drawn from 0, which does not exaggerate the differences.
    """
    means = [value for line in lines for value in line.band.mean]
    edges = [value for line in lines for value in (*line.band.low, *line.band.high)]
    if not means:
        return
    low, high = min(means), max(means)
    room = 0.5 * (high - low)
    bottom, top = max(min(edges), low - room), min(max(edges), high + room)
    bottom = max(bottom, 0.0) if low >= 0 else bottom  # shares, rewards and times have nothing to show below 0
    if shares and high - low < _SMALL_DIFFERENCE * high:
        bottom = 0.0
    if top > bottom:
        margin = 0.05 * (top - bottom)
        axis.set_ylim(scale * (bottom - margin), scale * (top + margin))


def _draw_band(axis: Axes, line: Line, scale: float, floor: float | None) -> None:
    band, colour, gid = line.band, variant_colour(line.number), f"v-{line.number}"
    if not band.x:
        return
    low, mean, high = (np.asarray(values) * scale for values in (band.low, band.mean, band.high))
    if floor is not None:
        low, mean, high = (np.maximum(values, floor * scale) for values in (low, mean, high))
    x, whole = np.asarray(band.x), np.asarray(band.count) == max(band.count)
    axis.fill_between(x, low, high, where=whole, color=colour, alpha=0.14, lw=0, gid=gid)
    axis.plot(x[whole], mean[whole], color=colour, lw=1.7, gid=gid)
    if not whole.all():  # from the last x that all seeds reached
        start = max(int(whole.sum()) - 1, 0)
        axis.plot(x[start:], mean[start:], color=colour, lw=1.1, ls=(0, (2, 2)), gid=gid)
    for end_x, end_y in line.ends:
        axis.plot([end_x], [max(end_y, floor or end_y) * scale], "x", color=colour, ms=6, mew=1.6, gid=gid)


def _tidy(axis: Axes, *, log: bool, percent: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if log:
        axis.yaxis.set_major_locator(LogLocator(numticks=6))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="y", which="minor", length=0)
    unit = " %" if percent else ""
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{short(value)}{unit}"))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(FuncFormatter(short))


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, 24)[:2])
