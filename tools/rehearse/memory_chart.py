"""Device memory over a rehearsed step as stacked areas, a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.rehearse.records import KINDS, MemoryPoint, RankRecord
from megatron_gspo.tools.rehearse.rehearsal_tables import short_roles
from megatron_gspo.tools.svg_panel import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b79a20", "#e45756", "#9ecae9")  # by kind
_TEXT = "#0f172a"
_FAINT = "#475569"
_PHASE_NAMES = {
    "old_log_probs": "old log-probs",
    "ref_log_probs": "reference",
    "values": "values",
    "critic": "value model",
    "forward_backward": "forward, backward",
    "weight_export": "export",
    "checkpoint_plan": "checkpoint",
}
_LEAST_LABEL = 0.07  # of the width: a narrower phase has no name
_SIZE = (6.4, 3.3)  # inches


def title_of(record: RankRecord) -> str:
    """Rank and roles."""
    return f"Rank {record.rank}" + (f": {short_roles(record.roles)}" if record.roles else "")


def draw_png(records: Sequence[RankRecord], output: Path) -> Path:
    """The charts of all ranks on one sheet. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(records))
    rows = -(-len(records) // columns)
    figure = Figure(
        figsize=(_SIZE[0] * columns, _SIZE[1] * rows + 0.4), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, record in zip(axes, records, strict=False):
        draw_memory(axis, record)
        axis.set_title(title_of(record), fontsize=10.5, loc="left", color=_TEXT)
        axis.set_axisbelow(True)
        axis.grid(True, color="#e2e8f0", lw=0.8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[len(records) :]:
        axis.axis("off")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3 * columns, frameon=False)
    figure.savefig(output)
    return output


def draw_memory(axis: Axes, record: RankRecord) -> None:
    """Stacked areas by kind over the operations; phases are separated by lines, and the peak is
    marked.
    """
    peak = record.memory.peak
    points = sorted([*record.memory.timeline, peak], key=lambda point: point.index)
    x = [point.index for point in points]
    areas = [[point.bytes.get(kind, 0) / GIB for point in points] for kind in KINDS]
    axis.stackplot(x, *areas, colors=_COLOURS, labels=KINDS, step="post", lw=0)
    top = max(point.total for point in points) / GIB
    axis.set_ylim(0, 1.22 * max(top, 1e-9))
    axis.set_xlim(x[0], max(x[-1], x[0] + 1))
    for phase, start, end in phase_spans(points):
        if start > x[0]:
            axis.axvline(start, color=_FAINT, lw=0.7, ls=":")
        if end - start >= _LEAST_LABEL * (x[-1] - x[0]):
            name = _PHASE_NAMES.get(phase, phase)
            axis.text(
                (start + end) / 2,
                1.2 * top,
                name,
                ha="center",
                va="top",
                fontsize=8,
                color=_FAINT,
                wrap=True,
            )
    axis.plot([peak.index], [peak.total / GIB], "o", color=_TEXT, ms=3.5)
    late = peak.index > (x[0] + x[-1]) / 2
    axis.annotate(
        f"{peak.total / GIB:.2f} GiB",
        (peak.index, peak.total / GIB),
        (-5 if late else 5, 4),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=8.5,
        color=_TEXT,
    )
    axis.xaxis.set_major_formatter(short)
    axis.set_xlabel("operations", fontsize=8.5)
    axis.set_ylabel("GiB", fontsize=8.5)


def phase_spans(points: Sequence[MemoryPoint]) -> list[tuple[str, int, int]]:
    """Each phase with the index at which it starts and that at which the next does, the last
    with its own last.
    """
    starts: list[tuple[str, int]] = []
    for point in points:
        if not starts or starts[-1][0] != point.phase:
            starts.append((point.phase, point.index))
    ends = [start for _, start in starts[1:]] + [points[-1].index]
    return [(phase, start, end) for (phase, start), end in zip(starts, ends, strict=True)]
