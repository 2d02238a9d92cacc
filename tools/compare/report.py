"""Write report.html, one page with verdicts, intervals and curves, runs.csv, a line per run, and
accuracy.csv, a line per evaluation.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gspo.tools.compare.charts import charts, colour_of
from megatron_gspo.tools.compare.run_records import (
    Run,
    figures,
    mean_of,
    series,
    tokens_by_step,
)
from megatron_gspo.tools.compare.statistics import Difference, interval_text
from megatron_gspo.tools.compare.study import (
    PRIMARY,
    Study,
    differences,
    mean_value,
    run_counts,
    verdict_of,
)
from megatron_gspo.tools.compare.study_plan import arguments_of
from megatron_gspo.tracking.progress import are_accuracies
from megatron_gspo.tracking.run_directory import write_atomically

# Figures of a run, and metrics whose means over its steps follow them in a line of runs.csv.
CSV_FIGURES = (
    "collapsed",
    "steps",
    "start_accuracy",
    "best_accuracy",
    "final_accuracy",
    "tokens",
    "seconds",
)
CSV_METRICS = (
    "reward/mean",
    "clip_fraction/tokens",
    "clip_fraction/sequences",
    "effective_sample_size",
    "routing/flip_rate",
    "routing/rollout_flip_rate",
    "routing/replay_bytes",
    "perf/peak_memory_gib",
    "time/step",
    "time/generate",
    "time/log_probs",
    "time/train",
    "time/weight_sync",
)

# Of a step: the metric, its head, and by what its value is multiplied.
COSTS = (
    ("time/step", "seconds", 1.0),
    ("time/generate", "generate", 1.0),
    ("time/log_probs", "log-probs", 1.0),
    ("time/train", "train", 1.0),
    ("time/weight_sync", "weight sync", 1.0),
    ("perf/peak_memory_gib", "peak memory, GiB", 1.0),
    ("routing/replay_bytes", "replayed routes, MiB", 2.0**-20),
)


def write_report(study: Study, folder: Path) -> list[Path]:
    """Write the files, each atomically. Raises ImportError without matplotlib, scipy or jinja2."""
    contents = {
        "report.html": page_of(study),
        "runs.csv": csv_text(study),
        "accuracy.csv": accuracy_text(study),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        write_atomically(folder / name, text)
    return [folder / name for name in contents]


def csv_text(study: Study) -> str:
    """One line per run."""
    output = io.StringIO()
    heads = ["variant", "seed", "status", *CSV_FIGURES, *CSV_METRICS, "run_dir", "message"]
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(heads)
    for run in study.runs:
        numbers = asdict(figures(run))
        line = [run.variant, run.seed, run.status]
        line += [numbers[name] for name in CSV_FIGURES]
        line += [mean_of(run, metric) for metric in CSV_METRICS]
        line += [str(run.run_dir), run.message]
        writer.writerow(_csv_value(value) for value in line)
    return output.getvalue()


def accuracy_text(study: Study) -> str:
    """One line per evaluation of held-out prompts, with the tokens that were trained on before it."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(["variant", "seed", "step", "tokens", "accuracy"])
    for run in study.runs:
        tokens = tokens_by_step(run)
        for step, accuracy in series(run, "eval/accuracy").items():
            numbers = (step, tokens[step], accuracy)
            writer.writerow([run.variant, run.seed, *map(_csv_value, numbers)])
    return output.getvalue()


def _csv_value(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def page_of(study: Study) -> str:
    """The text of report.html."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_gspo.tools.compare", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = [base64.b64encode(chart.encode()).decode() for chart in charts(study)]
    return environment.get_template("report.html").render(
        study=study,
        overview=overview(study),
        baseline=study.label(study.baseline),
        results=_results(study),
        cost_heads=[head for _, head, _ in COSTS],
        costs=_costs(study),
        images=images,
        incidents=_incidents(study),
        shared=arguments_of(study.overrides),
    )


def overview(study: Study) -> str:
    """Numbers of variants, seeds and runs, in one sentence."""
    numbers = (
        _counted(len(study.variants), "variant"),
        _counted(len(study.seeds), "seed"),
        f"{_counted(len(study.runs), 'run')} ({run_counts(study.runs)})",
    )
    return ", ".join(numbers) + "."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _results(study: Study) -> list[dict[str, Any]]:
    compared = differences(study, PRIMARY)
    table = []
    for variant in study.variants:
        name = variant.name
        line = {
            "label": study.label(name),
            "colour": colour_of(study, name),
            "runs": run_counts(study.runs_of(name)),
            "end": interval_text(mean_value(study, name, PRIMARY)),
            "difference": "",
            "p": "",
            "verdict": "baseline",
            "keys": arguments_of(variant.overrides),
        }
        if name != study.baseline:
            difference = compared.get(name)
            line["difference"] = interval_text(difference, sign="+")
            line["p"] = _p_values(difference)
            line["verdict"] = verdict_of(difference)
        table.append(line)
    return table


def _costs(study: Study) -> list[tuple[str, list[str]]]:
    """Each variant's means over steps and runs."""
    return [
        (
            study.label(variant.name),
            [_mean_text(study.runs_of(variant.name), metric, scale) for metric, _, scale in COSTS],
        )
        for variant in study.variants
    ]


def _mean_text(runs: Sequence[Run], metric: str, scale: float) -> str:
    means = [mean for run in runs if (mean := mean_of(run, metric)) is not None]
    return f"{scale * sum(means) / len(means):.3g}" if means else "-"


def _p_values(difference: Difference | None) -> str:
    if difference is None or difference.p_t is None or difference.p_holm is None:
        return "-"
    return f"{difference.p_t:.3f} / {difference.p_holm:.3f}"


def _incidents(study: Study) -> list[str]:
    """Failed, incomplete and missing runs, by name; and whether rewards are no accuracies."""
    lines = []
    for run in study.runs:
        if run.status == "failed":
            lines.append(f"{run.name}: failed after step {run.last_step}: {run.message}")
        elif run.status == "partial":
            lines.append(f"{run.name}: incomplete, step {run.last_step}")
        elif run.status == "missing":
            lines.append(f"{run.name}: missing")
    rewards = [reward for run in study.runs for reward in series(run, "eval/accuracy").values()]
    if not are_accuracies(rewards):
        lines.append(
            "held-out rewards are beyond 0 to 1 and so no accuracies; evaluation.verifier scores"
            " held-out responses with another verifier"
        )
    return lines
