"""Plots of a run's metrics, from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gspo.tracking.run_directory import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One small plot: a title and its curves as (metric, label); scale multiplies the values."""

    title: str
    curves: tuple[tuple[str, str], ...]
    scale: float = 1.0
    sparse: bool = False  # few points, with markers; no smoothing
    from_zero: bool = False  # the axis starts at 0
    unless: str = ""  # omit the panel if this metric exists


PANELS = (
    Panel("Training reward (mean)", (("reward/mean", ""),)),
    Panel("Training loss", (("loss", ""),), unless="reward/mean"),
    Panel("Held-out accuracy, %", (("eval/accuracy", ""),), scale=100.0, sparse=True),
    Panel(
        "Clipped, %",
        (("clip_fraction/tokens", "tokens"), ("clip_fraction/sequences", "sequences")),
        scale=100.0,
        from_zero=True,
    ),
    Panel("Response length, tokens", (("response_length/mean", ""),)),
    Panel("Entropy, nats per token", (("entropy", ""),)),
    Panel(
        "Throughput, tokens/s",
        (
            ("perf/tokens_per_second", "whole step"),
            ("perf/generated_tokens_per_second", "generation"),
        ),
        from_zero=True,
    ),
    Panel(
        "Model FLOPs, % of the peak",
        (("perf/mfu", "updates"), ("perf/log_probs_mfu", "log-probs")),
        scale=100.0,
        from_zero=True,
    ),
    Panel(
        "Idle, % of the step",
        (("perf/trainer_idle", "trainer"), ("perf/servers_idle", "servers")),
        scale=100.0,
        from_zero=True,
    ),
)
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#475569")
COLUMNS = 2
# Sizes in inches and points: a picture of 6.6 inches is read at 400 pixels (a page on a phone,
# where 9 points are 8 pixels) and, at 190 dots an inch, at 1,200.
_WIDTH = 6.6
_PANEL_HEIGHT = 2.25
_DPI = 190
_TITLE = 10.5
_LABEL = 9.0
_LONGEST_NAME = 40  # characters of the run's name in the title


def svg_style(salt: str) -> dict[str, Any]:
    """Parameters of matplotlib for an SVG picture: text stays text, and equal data give equal bytes.

    salt: of the picture's ids, which differ on one page.
    """
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def draw_run(run_dir: str | Path) -> Path:
    """Draw run_dir/curves.png, the panels that have data in run_dir/metrics.jsonl.

    Raises ImportError without matplotlib and ValueError if there is nothing to draw.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'megatron-gspo[plot]'") from None
    run_dir = Path(run_dir)
    output = run_dir / "curves.png"
    records = read_metrics(run_dir)
    panels = [panel for panel in PANELS if _has_data(panel, records)]
    if not panels:
        raise ValueError(f"{run_dir}: holds no metric to draw; train at least one step")
    with rc_context({"text.parse_math": False}):  # a run's name is text: two dollars are no formula
        _draw(panels, records, _short_name(run_dir.resolve().name), output)
    return output


def _draw(panels: Sequence[Panel], records: Records, title: str, output: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(panels))
    num_rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(_WIDTH * columns / COLUMNS, _PANEL_HEIGHT * num_rows + 0.4),
        dpi=_DPI,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, columns, squeeze=False).flatten()
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
        _draw_panel(axis, panel, records)
        if number >= len(panels) - columns:  # below it there is no panel
            axis.set_xlabel("step", fontsize=_LABEL, color="#475569")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=_TITLE + 1, color="#0f172a")
    figure.savefig(output)


def _short_name(name: str) -> str:
    """A name for the title: of a long one, its end."""
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def series(records: Records, metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of the records that hold the metric."""
    points = [
        (record["step"], record[metric]) for record in records if record.get(metric) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last window values at each point (fewer at the start)."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / (min(i + 1, window))
        for i in range(len(values))
    ]


def _has_data(panel: Panel, records: Records) -> bool:
    if panel.unless and series(records, panel.unless)[0]:
        return False
    return any(series(records, metric)[0] for metric, _ in panel.curves)


def _draw_panel(axis: Axes, panel: Panel, records: Records) -> None:
    for colour, (metric, label) in zip(COLOURS, panel.curves, strict=False):
        steps, values = series(records, metric)
        if steps:
            scaled = [panel.scale * value for value in values]
            _draw_curve(axis, steps, scaled, colour, label, sparse=panel.sparse)
    axis.set_title(panel.title, fontsize=_TITLE, loc="left", color="#0f172a")
    axis.locator_params(nbins=5)
    axis.tick_params(labelsize=_LABEL, colors="#475569")
    axis.grid(True, color="#e2e8f0", lw=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#cbd5e1")
    axis.ticklabel_format(axis="y", useOffset=False)
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    if any(label for _, label in panel.curves):
        axis.legend(fontsize=_LABEL, frameon=False)


def _draw_curve(
    axis: Axes, steps: list[float], values: list[float], colour: str, label: str, *, sparse: bool
) -> None:
    """One curve. sparse: with markers, and the first and last value beside them."""
    if sparse:
        axis.plot(steps, values, color=colour, lw=1.8, marker="o", ms=4, label=label)
        text: dict[str, Any] = {"textcoords": "offset points", "fontsize": _LABEL, "color": colour}
        # The label of the first point does not cover the curve.
        below = len(values) > 1 and values[1] > values[0]
        axis.annotate(f"{values[0]:.1f}", (steps[0], values[0]), (7, -5 if below else 3), **text)
        if len(values) > 1:
            axis.annotate(f"{values[-1]:.1f}", (steps[-1], values[-1]), (0, 7), ha="center", **text)
        axis.margins(x=0.08, y=0.18)
        return
    window = max(1, len(values) // 25)
    if window > 1:
        axis.plot(steps, values, color=colour, lw=0.8, alpha=0.25)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, smooth(values, window), color=colour, lw=1.8, marker=marker, label=label)
