"""Held-out accuracy of the runs of both tasks: a table, a file with a line for each evaluation, and
the picture of docs/agent_packages.md.

python examples/agents/tiny/draw.py runs/agents docs/agents/accuracy.csv docs/images/agents.svg
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

TASKS = {
    "calculator": ("OpenAI Agents SDK, a calculator", "#1d5fd1"),
    "files": ("mini-swe-agent, small files", "#0f8a5f"),
}
TEXT = "#1b2330"
FAINT = "#5b6676"

Curve = dict[int, float]
"""Accuracy in percent by step."""


def read_curve(run: Path) -> Curve:
    """Of a run directory."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]
    return {step["step"]: 100 * step["eval/accuracy"] for step in steps if "eval/accuracy" in step}


def read_curves(folder: Path) -> dict[str, dict[str, Curve]]:
    """By task and seed."""
    return {
        task: {
            run.name.removeprefix("seed_"): read_curve(run)
            for run in sorted((folder / task / "runs" / "base" / "gspo").iterdir())
        }
        for task in TASKS
    }


def write_csv(curves: dict[str, dict[str, Curve]], file: Path) -> None:
    """A line for each evaluation."""
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(["task", "seed", "step", "accuracy"])
        for task, seeds in curves.items():
            for seed, curve in seeds.items():
                writer.writerows([task, seed, step, f"{value:g}"] for step, value in curve.items())


def print_table(curves: dict[str, dict[str, Curve]]) -> None:
    """Accuracy before and after, of each seed and on average."""
    print("| agent | before, % | after, % | gain by seed, points | mean |")
    print("| --- | --- | --- | --- | --- |")
    for task, seeds in curves.items():
        starts = [curve[min(curve)] for curve in seeds.values()]
        ends = [curve[max(curve)] for curve in seeds.values()]
        gains = [end - start for start, end in zip(starts, ends, strict=True)]
        columns = [
            ", ".join(f"{value:.0f}" for value in values) for values in (starts, ends, gains)
        ]
        print(f"| {TASKS[task][0]} | {' | '.join(columns)} | {sum(gains) / len(gains):.0f} |")


def draw(curves: dict[str, dict[str, Curve]], file: Path) -> None:
    """A line for each seed, and their mean."""
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "agents",
        "font.family": "sans-serif",
        "text.color": TEXT,
        "axes.edgecolor": "#d9dee6",
        "axes.labelcolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    figure, axes = plt.subplots(
        1, len(TASKS), figsize=(7.4, 2.9), sharey=True, layout="constrained"
    )
    for axis, (task, seeds) in zip(axes, curves.items(), strict=True):
        title, color = TASKS[task]
        for curve in seeds.values():
            axis.plot(list(curve), list(curve.values()), "o-", color=color, alpha=0.4, lw=1.2, ms=3)
        steps = sorted(set.intersection(*(set(curve) for curve in seeds.values())))
        means = [sum(curve[step] for curve in seeds.values()) / len(seeds) for step in steps]
        axis.plot(steps, means, color=color, lw=3)
        axis.annotate(
            f"{means[-1]:.0f} %",
            (steps[-1], means[-1]),
            (6, -4),
            textcoords="offset points",
            color=color,
            annotation_clip=False,
        )
        axis.set_title(title, fontsize=11, loc="left", color=color, fontweight="bold")
        axis.set_xlabel("step")
    axes[0].set_ylim(0, 100)
    axes[0].set_ylabel("held-out accuracy, %")
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def main(folder: str, table: str, picture: str) -> None:
    curves = read_curves(Path(folder))
    Path(table).parent.mkdir(parents=True, exist_ok=True)
    write_csv(curves, Path(table))
    print_table(curves)
    draw(curves, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
