"""The text of a plan: Markdown tables of the layouts, of those rehearsed, and the config keys
of the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.gpus import GIB
from megatron_gspo.tools.plan.estimate import Estimator, Hardware
from megatron_gspo.tools.plan.layout_search import Search
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters
from megatron_gspo.tools.plan.rehearsals import RehearsedLayout


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def describe(estimator: Estimator, room: float) -> str:
    """The model, what it is trained on, and the GPUs."""
    shape = estimator.shape
    config = estimator.config
    hardware = estimator.hardware
    return (
        f"{shape.model_type}, {total_parameters(shape) / 1e9:.1f} billion parameters,"
        f" {active_parameters(shape) / 1e9:.1f} active per token, {config.model.dtype};"
        f" {config.training.global_batch_size} sequences of {estimator.longest:,} tokens in an"
        f" optimizer step; {hardware.gpus} x {hardware.gpu.name}, of"
        f" {hardware.gpu.memory / GIB:.1f} GiB {room / GIB:.1f} to fill."
    )


def ranking(search: Search, top: int) -> str:
    """One row per layout."""
    rows = [
        [
            "layout",
            "recompute",
            "tokens",
            "micro-batches",
            "states, GiB",
            "activations",
            "sum",
            "seconds",
        ]
    ]
    for estimate in search.estimates[:top]:
        choice = estimate.choice
        states = estimate.memory - estimate.activations
        sizes = [f"{size / GIB:.1f}" for size in (states, estimate.activations, estimate.memory)]
        rows.append(
            [name_of(choice.parallel), choice.recompute, f"{choice.max_tokens:,}"]
            + [str(estimate.micro_batches), *sizes, f"{estimate.seconds:.1f}"]
        )
    return table(rows)


def rehearsed_table(layouts: Sequence[RehearsedLayout], room: float) -> str:
    """One row per rehearsed layout, and a line for each that failed or does not fit."""
    rows = [
        [
            "rehearsed",
            "weights, GiB",
            "gradients",
            "optimizer",
            "activations",
            "peak",
            "seconds",
            "compute",
            "communication",
            "bubble",
        ]
    ]
    problems = []
    for layout in layouts:
        name = name_of(layout.estimate.choice.parallel)
        figures = layout.figures
        if figures is None:
            problems.append(f"- {name}: {layout.failure}")
            continue
        if not layout.fits(room):
            problems.append(f"- {name} does not fit: {figures.peak / GIB:.1f} GiB")
        states = [figures.states.get(kind, 0) for kind in ("weights", "gradients", "optimizer")]
        sizes = [f"{size / GIB:.1f}" for size in (*states, figures.activations, figures.peak)]
        times = (figures.seconds, figures.compute, figures.communication, figures.bubble)
        rows.append([name, *sizes, *(f"{seconds:.1f}" for seconds in times)])
    text = table(rows) if len(rows) > 1 else ""
    return "\n\n".join(part for part in (text, "\n".join(problems)) if part)


def assumed(hardware: Hardware) -> str:
    return (
        "Rehearsed seconds are those of the step's operations at measured speeds. The formulas"
        f" assume that a GPU reaches {100 * hardware.efficiency:g} % of its peak (--efficiency)."
        f" Both assume that links reach {100 * hardware.link_efficiency:g} % of theirs"
        " (--link-efficiency), that nothing overlaps, and that every response is as long as the"
        " longest. Generation is not counted."
    )
