"""Write report.html, one page with verdicts, intervals and curves, and runs.csv, a line per run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gspo.config.load import flat
from megatron_gspo.config.rollout_sections import noise_in_words
from megatron_gspo.errors import show_bytes
from megatron_gspo.tools.compare.charts import accuracy_charts, interval_charts, metric_charts
from megatron_gspo.tools.compare.run_records import Run, figures, mean_of, seconds_per_step
from megatron_gspo.tools.compare.statistics import Difference, interval_text
from megatron_gspo.tools.compare.study import (
    PRIMARY,
    Study,
    differences,
    expectations,
    mean_value,
    run_counts,
    verdict_of,
)
from megatron_gspo.tools.compare.study_plan import arguments_of
from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tools.svg_panel import COLOURS
from megatron_gspo.tracking.run_directory import write_atomically

TEMPLATE = "compare/report.html"

# Metrics of the cost table, and their heads.
PHASES = (
    ("time/generate", "generation"),
    ("time/log_probs", "old log-probs"),
    ("time/train", "updates"),
    ("time/weight_sync", "weight sync"),
)
ROUTES = (
    ("routing/replay_bytes", "routes stored"),
    ("routing/bytes_moved", "routes moved"),
)
# Figures of a run, and metrics whose means over its steps follow them in a line of runs.csv.
CSV_FIGURES = (
    "collapsed",
    "steps",
    "start_accuracy",
    "best_accuracy",
    "final_accuracy",
    "mean_accuracy",
    "reward",
    "samples",
    "tokens",
    "seconds",
)
CSV_METRICS = (
    "clip_fraction/tokens",
    "clip_fraction/sequences",
    "effective_sample_size",
    "routing/flip_rate",
    "routing/rollout_flip_rate",
    "time/step",
    *(metric for metric, _ in (*PHASES, *ROUTES)),
)


def write_report(study: Study, folder: str | Path) -> list[Path]:
    """Write the files, each atomically. Raises ImportError without matplotlib, scipy or jinja2."""
    folder = Path(folder)
    contents = {
        "report.html": render_page(TEMPLATE, page_context(study)),
        "runs.csv": csv_text(study),
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


def _csv_value(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def page_context(study: Study) -> dict[str, Any]:
    """What the template shows: all numbers as text."""
    colours = {variant.name: number for number, variant in enumerate(study.variants)}
    return {
        "title": study.title,
        "study": study,
        "overview": _overview(study),
        "chips": {
            variant.name: {
                "label": study.label(variant.name),
                "number": colours[variant.name],
                "colour": colours[variant.name] % COLOURS,
            }
            for variant in study.variants
        },
        "baseline": study.label(study.baseline),
        "perturbed": perturbations(study),
        "expectations": expectations(study),
        "results": _results(study),
        "intervals": interval_charts(study, colours),
        "accuracy": accuracy_charts(study, colours),
        "metrics": metric_charts(study, colours),
        "phases": [words for _, words in PHASES],
        "routes": [words for _, words in ROUTES],
        "costs": _costs(study),
        "incidents": _incidents(study),
        "variants": _variants(study),
        "shared": arguments_of(study.overrides),
        "versions": _versions(study),
        "resolved": _resolved(study),
    }


def perturbations(study: Study) -> list[str]:
    """The perturbations of routers that any run was made under, in words."""
    words = {
        noise_in_words(
            run.setting("router_noise.engines", "none"),
            run.setting("router_noise.strength"),
            run.setting("router_noise.target_flip_rate"),
        )
        for run in study.runs
    }
    return sorted(words - {""})


def _results(study: Study) -> list[dict[str, str]]:
    compared = differences(study, PRIMARY)
    table = []
    for variant in study.variants:
        name = variant.name
        line = {
            "name": name,
            "runs": run_counts(study.runs_of(name)),
            "end": interval_text(mean_value(study, name, PRIMARY)),
            "mean": interval_text(mean_value(study, name, "mean_accuracy")),
            "reward": interval_text(mean_value(study, name, "reward"), 1.0, 3),
            "difference": "",
            "p": "",
            "verdict": "baseline",
        }
        if name != study.baseline:
            difference = compared.get(name)
            line["difference"] = interval_text(difference, sign="+")
            line["p"] = _p_values(difference)
            line["verdict"] = verdict_of(difference)
        table.append(line)
    return table


def _p_values(difference: Difference | None) -> str:
    if difference is None or difference.p_t is None:
        return "-"
    return " / ".join(map(_p_value, (difference.p_t, difference.p_holm, difference.p_flip)))


def _p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _overview(study: Study) -> str:
    """Numbers of variants, seeds and runs, the model and the steps, in one sentence."""
    over = [run for run in study.runs if run.is_over]
    finished = sum(run.status == "finished" for run in over)
    failed = f", {len(over) - finished} failed" if len(over) > finished else ""
    words = [
        _counted(len(study.variants), "variant"),
        _counted(len(study.seeds), "seed"),
        f"{_counted(len(over), 'run')} ({finished} finished{failed})",
    ]
    steps = _values(study, "training.steps")
    if steps:
        words.append(f"{' or '.join(steps)} rollout batches each")
    models = _values(study, "model.path")
    if models:
        words.append(f"the model {' or '.join(models)}")
    return ", ".join(words) + "."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _values(study: Study, key: str) -> list[str]:
    """The different values of a key, as text, without null."""
    values = [run.setting(key) for run in study.runs]
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _costs(study: Study) -> list[dict[str, Any]]:
    baseline = _mean(seconds_per_step(run) for run in study.runs_of(study.baseline))
    table = []
    for variant in study.variants:
        runs = study.runs_of(variant.name)
        seconds = _mean(seconds_per_step(run) for run in runs)
        if seconds is None:
            continue
        change = "-" if baseline is None else f"{100 * (seconds / baseline - 1):+.1f} %"
        routes = [_mean_over(runs, metric) for metric, _ in ROUTES]
        table.append(
            {
                "name": variant.name,
                "step": _decimal(seconds),
                "change": "baseline" if variant.name == study.baseline else change,
                "phases": [_decimal(_mean_over(runs, metric)) for metric, _ in PHASES],
                "memory": _decimal(_mean_over(runs, "perf/peak_memory_gib")),
                "routes": [show_bytes(count) if count else "-" for count in routes],
            }
        )
    return table


def _mean_over(runs: Sequence[Run], metric: str) -> float | None:
    """Mean over the runs of the mean over all steps but the first."""
    return _mean(mean_of(run, metric, first=2) for run in runs)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _variants(study: Study) -> list[dict[str, Any]]:
    """Clip range and learning rate that each variant ran with, and its keys."""
    table = []
    for variant in study.variants:
        run = next((run for run in study.runs_of(variant.name) if run.config), None)
        table.append(
            {
                "name": variant.name,
                "clip": "-" if run is None else _clip_range(run),
                "rate": "-" if run is None else f"{run.setting('optimizer.lr', 0.0):g}",
                "keys": arguments_of(variant.overrides),
            }
        )
    return table


def _clip_range(run: Run) -> str:
    low = run.setting("algorithm.epsilon_low")
    high = run.setting("algorithm.epsilon_high")
    return "the preset's" if low is None or high is None else f"{low:g} / {high:g}"


def _versions(study: Study) -> dict[str, str]:
    """Of the runs' environments, without paths and host names, because reports are shared."""
    versions: dict[str, list[str]] = {}
    for run in study.runs:
        environment = run.environment
        told = {
            "python": environment.get("python"),
            **(environment.get("versions") or {}),
            "megatron_gspo": environment.get("megatron_gspo"),
            "revision": environment.get("git_revision"),
            "platform": environment.get("platform"),
        }
        for key, value in told.items():
            if value is not None and str(value) not in versions.setdefault(key, []):
                versions[key].append(str(value))
    return {key: ", ".join(values) for key, values in versions.items()}


def _resolved(study: Study) -> list[str]:
    """Every key of the first run."""
    first = next((run.config for run in study.runs if run.config), None)
    if first is None:
        return []
    keys = {key: value for key, value in flat(first).items() if key not in ("run_dir", "seed")}
    return arguments_of(keys)


def _incidents(study: Study) -> list[str]:
    """Failed, incomplete and missing runs, by name."""
    lines = []
    for run in study.runs:
        if run.status == "failed":
            lines.append(f"{run.name}: failed after step {run.last_step}: {run.message}")
        elif run.status == "partial":
            lines.append(f"{run.name}: incomplete, step {run.last_step}")
        elif run.status == "missing":
            lines.append(f"{run.name}: missing")
    return lines
