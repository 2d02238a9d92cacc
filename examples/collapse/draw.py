"""Draw the picture of docs/collapse.md from a runs.csv of `make collapse`.

python examples/collapse/draw.py docs/collapse/runs.csv docs/images/collapse.svg
"""

from __future__ import annotations

import csv
import sys

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from megatron_gspo.tracking.plots import svg_style

VARIANTS = {
    "grpo": ("GRPO", "#c2410c"),
    "grpo_r2": ("GRPO + R2", "#d99a00"),
    "grpo_r3": ("GRPO + R3", "#0f8a5f"),
    "gspo": ("GSPO", "#1d5fd1"),
}
TEXT = "#1b2330"
FAINT = "#5b6676"

Run = dict[str, str]


def percent(run: Run, column: str) -> float:
    return 100 * float(run[column])


def draw_accuracy(axis: Axes, runs: list[Run], title: str, color: str) -> None:
    """A line from start to end for each seed, and their mean."""
    starts = [percent(run, "start_accuracy") for run in runs]
    ends = [percent(run, "final_accuracy") for run in runs]
    for start, end in zip(starts, ends, strict=True):
        axis.plot([0, 1], [start, end], "o-", color=color, alpha=0.4, lw=1.2, ms=3.5)
    means = [sum(starts) / len(starts), sum(ends) / len(ends)]
    axis.plot([0, 1], means, "o-", color=color, lw=3, ms=6)
    axis.annotate(
        f"{means[1]:.0f} %", (1, means[1]), (8, -4), textcoords="offset points", color=color
    )
    axis.set_title(title, fontsize=11, loc="left", color=color, fontweight="bold")
    axis.set_xticks([0, 1], ["start", "end"])
    axis.set_xlim(-0.2, 1.5)


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    colors = {
        "text.color": TEXT,
        "axes.edgecolor": "#d9dee6",
        "axes.labelcolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
    }
    plt.style.use(svg_style("collapse") | colors)
    figure, axes = plt.subplots(1, 4, figsize=(9.4, 2.9), sharey=True, layout="constrained")
    for axis, (name, (title, color)) in zip(axes, VARIANTS.items(), strict=True):
        draw_accuracy(axis, [run for run in runs if run["variant"] == name], title, color)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("held-out accuracy, %")
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
