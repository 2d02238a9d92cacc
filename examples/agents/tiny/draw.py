"""The runs of both tasks: a table, a file with a line for each step, and the picture of
docs/agent_packages.md.

python examples/agents/tiny/draw.py runs/agents docs/agents/learning.csv docs/images/agents.svg
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from megatron_gspo.tracking.plots import svg_style

TASKS = {
    "calculator": ("OpenAI Agents SDK, a calculator", "#1d5fd1"),
    "files": ("mini-swe-agent, small files", "#0f8a5f"),
}
TEXT = "#1b2330"
FAINT = "#5b6676"


@dataclass(frozen=True)
class Run:
    """Percent by step: of held-out tasks that are solved, and of training tasks."""

    held_out: dict[int, float]
    training: dict[int, float]


def read_run(folder: Path) -> Run:
    """Of a run directory."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]

    def percent(name: str) -> dict[int, float]:
        return {step["step"]: 100 * step[name] for step in steps if name in step}

    return Run(percent("eval/accuracy"), percent("reward/mean"))


def read_runs(folder: Path) -> dict[str, dict[str, Run]]:
    """By task and seed, of the tasks that have runs."""
    runs = {}
    for task in TASKS:
        seeds = sorted((folder / task / "runs" / "base" / "gspo").glob("seed_*"))
        if seeds:
            runs[task] = {seed.name.removeprefix("seed_"): read_run(seed) for seed in seeds}
    return runs


def write_csv(runs: dict[str, dict[str, Run]], file: Path) -> None:
    """A line for each step; held_out is empty where nothing was evaluated."""
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(["task", "seed", "step", "training", "held_out"])
        for task, seeds in runs.items():
            for seed, run in seeds.items():
                for step in sorted(run.training.keys() | run.held_out.keys()):
                    values = [values.get(step) for values in (run.training, run.held_out)]
                    texts = ["" if value is None else f"{value:g}" for value in values]
                    writer.writerow([task, seed, step, *texts])


def print_table(runs: dict[str, dict[str, Run]]) -> None:
    """Held-out accuracy before and after, by seed."""
    print("| agent | solved before, % | after, % | gain, points | mean |")
    print("| --- | --- | --- | --- | --- |")
    for task, seeds in runs.items():
        curves = [run.held_out for run in seeds.values()]
        starts = [curve[min(curve)] for curve in curves]
        ends = [curve[max(curve)] for curve in curves]
        gains = [end - start for start, end in zip(starts, ends, strict=True)]
        columns = [
            ", ".join(f"{value:.0f}" for value in values) for values in (starts, ends, gains)
        ]
        print(f"| {TASKS[task][0]} | {' | '.join(columns)} | {sum(gains) / len(gains):.0f} |")


def draw(runs: dict[str, dict[str, Run]], file: Path) -> None:
    """Held-out accuracy of each seed as points, and that of training as thin lines."""
    colors = {
        "text.color": TEXT,
        "axes.edgecolor": "#d9dee6",
        "axes.labelcolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
    }
    plt.style.use(svg_style("agents") | colors)
    size = (4.2 * len(runs), 2.9)
    figure, grid = plt.subplots(
        1, len(runs), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    axes = grid[0]
    for axis, (task, seeds) in zip(axes, runs.items(), strict=True):
        title, color = TASKS[task]
        for run in seeds.values():
            axis.plot(list(run.training), list(run.training.values()), color=color, alpha=0.3, lw=1)
            axis.plot(
                list(run.held_out), list(run.held_out.values()), "o-", color=color, lw=2, ms=5
            )
        axis.set_title(title, fontsize=11, loc="left", color=color, fontweight="bold")
        axis.set_xlabel("step")
    axes[0].set_ylim(0, 100)
    axes[0].set_ylabel("solved, %")
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def main(folder: str, table: str, picture: str) -> None:
    runs = read_runs(Path(folder))
    Path(table).parent.mkdir(parents=True, exist_ok=True)
    write_csv(runs, Path(table))
    print_table(runs)
    draw(runs, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
