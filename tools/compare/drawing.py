"""The report's charts as inline SVG, drawn with matplotlib and coloured by the page's CSS variables.

matplotlib writes plain colours; each of the placeholders below becomes `var(--name)`, so that one drawing serves the
light and the dark page. A variant's marks carry the class `v-N`, which the page's legend switches on and off.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_gspo.tools.compare.statistics import Band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 8  # of variants; more start over
_PLACEHOLDERS = {f"#{0xA1B200 + i:06x}": f"v{i}" for i in range(COLOURS)} | {
    f"#{0xA1B300 + i:06x}": f"p{i}" for i in range(10)
}
_TEXT, _GRID, _FAINT = "#a1b400", "#a1b401", "#a1b402"
_PLACEHOLDERS |= {_TEXT: "text", _GRID: "grid", _FAINT: "faint"}
_SIZE = (4.6, 2.9)  # inches; a panel is about 330 points wide, so that it needs no scaling on a phone
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "comparison",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _FAINT,
    "axes.titlecolor": _TEXT,
    "text.color": _TEXT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "grid.color": _GRID,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Line:
    """One variant's band in a panel. number: its colour; ends: where single runs stopped with an error."""

    number: int
    band: Band
    ends: list[tuple[float, float]] = field(default_factory=list)


def variant_colour(number: int) -> str:
    return f"#{0xA1B200 + number % COLOURS:06x}"


def phase_colour(number: int) -> str:
    return f"#{0xA1B300 + number % 10:06x}"


def band_panel(
    title: str, xlabel: str, lines: Sequence[Line], *, percent: bool = False, log_floor: float | None = None
) -> str:
    """Means with bands. log_floor: a log scale that draws smaller values, 0 too, at this height."""
    with _panel(title) as (axis, output):
        scale = 100.0 if percent else 1.0
        for line in lines:
            _draw_band(axis, line, scale, log_floor)
        if log_floor is not None:
            axis.set_yscale("log")
            axis.set_ylim(bottom=log_floor * scale * 0.8, top=2 * scale if percent else None)
        else:
            _set_height(axis, lines, scale)
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

    bands: label and (epsilon_low, epsilon_high); the first is this variant's own and shaded. reach: half the width of
    the x axis in log-ratio; what lies beyond is counted in the outermost bin.
    """
    with _panel(title) as (axis, output):
        edges = np.linspace(-reach, reach, 61)
        for values, kind in ((token, "step"), (sequence, "stepfilled")):
            share = np.histogram(np.clip(values, -reach, reach), bins=edges)[0] / max(len(values), 1)
            axis.stairs(
                100 * share,
                np.exp(edges),
                fill=kind == "stepfilled",
                color=variant_colour(number) if kind == "stepfilled" else _TEXT,
                alpha=0.55 if kind == "stepfilled" else 1.0,
                lw=1.1,
                gid=f"v-{number}",
                label="sequences" if kind == "stepfilled" else "tokens",
            )
        for place, (label, (low, high)) in enumerate(bands.items()):
            if place == 0:
                axis.axvspan(1 - low, 1 + high, color=_FAINT, alpha=0.18, lw=0, label=label)
            else:
                axis.axvline(1 - low, color=_FAINT, lw=0.9, ls=":", label=label)
                axis.axvline(1 + high, color=_FAINT, lw=0.9, ls=":")
        axis.set_yscale("log")
        axis.set_xlim(np.exp(-reach), np.exp(reach))
        axis.set_xlabel("ratio, new policy / old policy")
        axis.legend(fontsize=8, frameon=False, loc="upper right", handlelength=1.4, borderaxespad=0.1)
        _tidy(axis, log=True, percent=True)
    return output[0]


def cost_panel(labels: Sequence[str], parts: Sequence[tuple[int, Sequence[float]]]) -> str:
    """Stacked bars, one a variant: seconds a step of each phase, as (colour's number, one value a variant)."""
    height = 0.75 + 0.36 * len(labels)
    with _panel("", size=(5.2, height)) as (axis, output):
        left = np.zeros(len(labels))
        for number, seconds in parts:
            axis.barh(range(len(labels)), seconds, left=left, height=0.68, color=phase_colour(number), lw=0)
            left += np.asarray(seconds)
        axis.set_yticks(range(len(labels)), [_wrapped(label) for label in labels])
        axis.invert_yaxis()
        axis.set_xlabel("seconds a step")
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=_TEXT)
    return output[0]


def interval_panel(title: str, xlabel: str, rows: Sequence[tuple[int, str, Any]], *, zero: bool = False) -> str:
    """One dot and interval a row (number, label, something with mean, low and high)."""
    with _panel(title, size=(4.6, 0.9 + 0.3 * len(rows))) as (axis, output):
        for place, (number, _, found) in enumerate(rows):
            if found is None:
                continue
            colour = variant_colour(number)
            if found.low is not None:
                axis.plot([100 * found.low, 100 * found.high], [place, place], color=colour, lw=2, gid=f"v-{number}")
            axis.plot([100 * found.mean], [place], "o", color=colour, ms=5, gid=f"v-{number}")
        if zero:
            axis.axvline(0, color=_FAINT, lw=1)
        axis.set_yticks(range(len(rows)), [_wrapped(label) for _, label, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(xlabel)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=_TEXT)
    return output[0]


def _set_height(axis: Axes, lines: Sequence[Line], scale: float) -> None:
    """The axis shows every mean, and at most half as much again of the bands: with few seeds they are wide."""
    means = [value for line in lines for value in line.band.mean]
    edges = [value for line in lines for value in (*line.band.low, *line.band.high)]
    if not means:
        return
    low, high = min(means), max(means)
    room = 0.5 * (high - low)
    bottom, top = max(min(edges), low - room), min(max(edges), high + room)
    bottom = max(bottom, 0.0) if low >= 0 else bottom  # shares, rewards and times have nothing to show below 0
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
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}{unit}"))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, 24)[:2])


def _short(value: float, _: Any = None) -> str:
    """12,000 as 12k; 1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


@contextmanager
def _panel(title: str, size: tuple[float, float] = _SIZE) -> Iterator[tuple[Axes, list[str]]]:
    """An axis to draw on; afterwards the second value holds the SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    output: list[str] = []
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title or "panel"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        yield axis, output
        if title:
            axis.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
        figure.patch.set_alpha(0)
        axis.patch.set_alpha(0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    output.append(_for_page(buffer.getvalue(), title))


def _for_page(svg: str, title: str) -> str:
    """Without prologue, metadata, ids and fixed sizes; colours as CSS variables; rounded to a tenth of a point."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    name = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    link = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {link} {box.group(0) if box else ""} role="img" aria-label="{name}"'
    rest = re.sub(r'<g id="(v-\d+)"', r'<g class="\1"', rest)
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)
    for colour, variable in _PLACEHOLDERS.items():
        rest = rest.replace(colour, f"var(--{variable})")
    rest = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", rest)
    rest = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _rounded, tag.group()), rest)
    return head + ">" + re.sub(r"\s*\n\s*", " ", rest).strip()


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number.group()):.1f}".removesuffix(".0")
