"""The time line of a run's steps as a picture, from timeline.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.tracking.plots import COLOURS, svg_style
from megatron_gspo.tracking.run_directory import evenly_spaced, read_metrics

PHASES = {
    "generate": "generation, or the wait for it",
    "verify": "rewards",
    "exchange": "exchange",
    "log_probs": "log-probs, values",
    "values": "log-probs, values",
    "train": "updates",
    "train_critic": "updates",
    "weight_sync": "weight sync",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
}
"""What the picture calls each phase; all others are ``other``."""

OTHER = "other"
_SHADES = dict(zip(dict.fromkeys(PHASES.values()), (*COLOURS, "#0891b2", "#db2777"), strict=True))
_SHADES[OTHER] = "#94a3b8"
_MOST_STEPS = 12
_TEXT = 9.0
_INK = "#475569"


def draw_timeline(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Draw run_dir/timeline.svg (or output): a row for each of some evenly picked steps, with the
    spans of its phases. White is time outside of them.

    Raises ImportError without matplotlib and ValueError for a run without a step.
    """
    run_dir = Path(run_dir)
    file = run_dir / "timeline.jsonl"
    records = read_metrics(file) if file.exists() else []
    if not records:
        raise ValueError(f"{run_dir}: has no time line to draw; train at least one step")
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'megatron-gspo[plot]'") from None
    output = Path(output or run_dir / "timeline.svg")
    style: Any = {**svg_style("timeline"), "text.parse_math": False}
    with rc_context(style):
        _draw(evenly_spaced(records, _MOST_STEPS), run_dir.resolve().name, output)
    return output


def _draw(records: Sequence[Mapping[str, Any]], title: str, output: Path) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.0, 1.6 + 0.3 * len(records)), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    shown: dict[str, str] = {}
    for row, record in enumerate(records):
        for phase, begin, end in record["spans"]:
            name = PHASES.get(phase, OTHER)
            shown[name] = _SHADES[name]
            axis.barh(row, end - begin, left=begin, height=0.72, color=_SHADES[name], linewidth=0)
    axis.set_yticks(range(len(records)), [f"step {record['step']}" for record in records])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds since the step began", fontsize=_TEXT, color=_INK)
    axis.tick_params(labelsize=_TEXT, colors=_INK)
    axis.tick_params(axis="y", length=0)
    axis.grid(True, axis="x", color="#e2e8f0", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines["left"].set_visible(False)
    axis.spines["bottom"].set_color("#cbd5e1")
    axis.set_title(title, fontsize=_TEXT + 1.5, loc="left", color="#0f172a")
    handles = [Patch(color=_SHADES[name], label=name) for name in _SHADES if name in shown]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=_TEXT
    )
    figure.savefig(output, metadata={"Date": None})
