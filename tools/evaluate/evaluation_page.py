"""The results of an evaluation: lines of text, evaluation.html with charts, evaluation.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.errors import printable
from megatron_gspo.tools.compare.statistics import Interval, interval_text
from megatron_gspo.tools.evaluate.elo import PRIOR_MEAN, PRIOR_STD, Rating
from megatron_gspo.tools.evaluate.task_scores import TaskScores
from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tools.svg_panel import panel, variant_colour
from megatron_gspo.tracking.run_directory import write_atomically

TEMPLATE = "evaluate/report.html"
HEADS = (
    "model",
    "prompts",
    "responses",
    "accuracy, %",
    "against the first, points",
    "pass@k, %",
    "rating",
    "tokens",
    "truncated, %",
    "without a score",
)


def print_scores(scores: Sequence[TaskScores]) -> None:
    """A line per task and model on stdout."""
    for each in scores:
        passes = ", ".join(
            f"pass@{k} {interval_text(found)}" for k, found in each.pass_at_k.items() if k > 1
        )
        rating = "" if each.rating is None else f", rating {rating_text(each.rating)}"
        failed = f", {each.failures} responses without a score" if each.failures else ""
        accuracy = f"mean@{each.samples} {interval_text(each.accuracy)} %"
        print(
            printable(
                f"{each.task}, {each.label}:"
                f" {accuracy}{', ' if passes else ''}{passes}{rating}{failed}"
            )
        )


def write_results(
    scores: Sequence[TaskScores], output: Path, *, command: str, config: Config
) -> list[Path]:
    """Write evaluation.json and evaluation.html; returns them. Raises ImportError without
    matplotlib or jinja2.
    """
    record = {
        "command": command,
        "config": _used(config),
        "scores": [asdict(each) for each in scores],
    }
    write_atomically(output / "evaluation.json", json.dumps(record, indent=1) + "\n")
    page = render_page(TEMPLATE, page_context(scores, command, config))
    write_atomically(output / "evaluation.html", page)
    return [output / "evaluation.html", output / "evaluation.json"]


def page_context(scores: Sequence[TaskScores], command: str, config: Config) -> dict[str, Any]:
    """What the template shows: all numbers as text."""
    tasks = list(dict.fromkeys(each.task for each in scores))
    return {
        "title": f"Evaluation: {', '.join(tasks)}",
        "command": command,
        "prior": (f"{PRIOR_MEAN:g}", f"{PRIOR_STD:g}"),
        "settings": [(key, json.dumps(value)) for key, value in _used(config).items()],
        "heads": HEADS,
        "tasks": [_section([each for each in scores if each.task == task]) for task in tasks],
    }


def rating_text(found: Rating) -> str:
    """`1650 [1580, 1724]`."""
    return f"{found.rating:.0f} [{found.low:.0f}, {found.high:.0f}]"


def _section(scores: Sequence[TaskScores]) -> dict[str, Any]:
    first = scores[0]
    return {
        "name": first.task,
        "verifier": first.verifier,
        "left_out": [f"{count} {reason}" for reason, count in first.left_out.items()],
        "charts": [chart for chart in (steps_chart(scores), pass_chart(scores)) if chart],
        "rows": [_row(each) for each in scores],
    }


def _row(each: TaskScores) -> list[str]:
    passes = ", ".join(f"@{k} {interval_text(found)}" for k, found in each.pass_at_k.items())
    difference = "" if each.difference is None else interval_text(each.difference)
    rating = (
        ""
        if each.rating is None
        else f"{rating_text(each.rating)} ({each.rating.problems} problems)"
    )
    counts = [str(each.prompts), str(each.prompts * each.samples)]
    lengths = [f"{each.response_length:.0f}", f"{100 * each.truncated:.1f}", str(each.failures)]
    return [each.label, *counts, interval_text(each.accuracy), difference, passes, rating, *lengths]


def steps_chart(scores: Sequence[TaskScores]) -> str:
    """Accuracy over the steps of a run, or by model; an SVG."""
    is_run = all(each.step is not None for each in scores)
    x = [
        float(each.step if is_run and each.step is not None else place)
        for place, each in enumerate(scores)
    ]
    with panel(f"{scores[0].task}: mean@{scores[0].samples}, %") as (axis, output):
        mean = [100 * each.accuracy.mean for each in scores]
        axis.errorbar(
            x,
            mean,
            yerr=_bars([each.accuracy for each in scores]),
            marker="o",
            capsize=3,
            color=variant_colour(0),
            linestyle="-" if is_run else "none",
        )
        if not is_run:
            axis.set_xticks(x, [each.label for each in scores])
            axis.set_xlim(-0.5, len(scores) - 0.5)
        axis.set_xlabel("step" if is_run else "")
    return output[0]


def pass_chart(scores: Sequence[TaskScores]) -> str:
    """pass@k over k, a line per model; empty for a single k."""
    if len(scores[0].pass_at_k) < 2:
        return ""
    with panel(f"{scores[0].task}: pass@k, %") as (axis, output):
        for number, each in enumerate(scores):
            found = list(each.pass_at_k.values())
            axis.errorbar(
                list(each.pass_at_k),
                [100 * f.mean for f in found],
                yerr=_bars(found),
                marker="o",
                capsize=3,
                color=variant_colour(number),
                label=each.label,
            )
        axis.set_xscale("log", base=2)
        ks = list(scores[0].pass_at_k)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.set_xlabel("k")
        if len(scores) > 1:
            axis.legend(frameon=False, fontsize=8)
    return output[0]


def _bars(found: Sequence[Interval]) -> list[list[float]]:
    """Distances of the intervals' ends from the means, in percent; 0 without an interval."""
    below = [100 * (each.mean - (each.mean if each.low is None else each.low)) for each in found]
    above = [100 * ((each.mean if each.high is None else each.high) - each.mean) for each in found]
    return [below, above]


def _used(config: Config) -> dict[str, Any]:
    """The settings that the responses depend on."""
    data, rollout, found = config.data, config.rollout, config.evaluation
    return {
        "seed": config.seed,
        "rollout.engine": rollout.engine,
        "rollout.max_response_length": rollout.max_response_length,
        "model.dtype": config.model.dtype,
        "evaluation.n_samples": found.n_samples,
        "evaluation.temperature": found.temperature,
        "evaluation.top_p": found.top_p,
        "evaluation.top_k": found.top_k,
        "data.chat_template": data.chat_template,
        "data.chat_template_options": data.chat_template_options,
        "data.system_prompt": data.system_prompt,
        "data.prompt_template": data.prompt_template,
    }
