"""Write report.html (the page), glance.svg (its first charts), runs.csv (a line per run) and report.json (all data)."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gspo.tools.compare.claims import claims, expectations
from megatron_gspo.tools.compare.costs import PUBLISHED, cost_of, estimated_storage
from megatron_gspo.tools.compare.glance_picture import glance_picture
from megatron_gspo.tools.compare.report_page import TEMPLATE, context
from megatron_gspo.tools.compare.routing_plots import layers_of
from megatron_gspo.tools.compare.run_records import Run, figures, mean_of, series
from megatron_gspo.tools.compare.study import MEASURES, Study, differences, rows
from megatron_gspo.tools.compare.study_plan import BASE
from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tracking.run_directory import evenly_spaced, write_atomically

CSV_METRICS = (
    "clip_fraction/tokens",
    "clip_fraction/sequences",
    "routing/flip_rate",
    "routing/flipped_tokens",
    "routing/rollout_flip_rate",
    "routing/missing_routes",
    "routing/replay_bytes",
    "effective_sample_size",
    "time/step",
    "time/generate",
    "time/log_probs",
    "time/train",
    "time/routing",
    "time/weight_sync",
)
SERIES = ("reward/mean", "eval/accuracy", *CSV_METRICS[:6], "entropy", "kl/old_policy", "routing/entropy")
_CURVES = 6  # variants whose curves a small picture shows
_POINTS = 120  # of a series in report.json; the run directories hold all


def write_report(study: Study, folder: str | Path) -> list[Path]:
    """Write the files, each atomically; no picture of nothing. Raises ImportError without matplotlib."""
    folder = Path(folder)
    page = context(study)
    labels = [study.label(name) for name in page["colours"]]
    first = page["doses"]["charts"] or page["charts"]["glance"]
    if len(labels) > _CURVES and page["charts"]["intervals"]:  # whose curves hide each other
        labels, first = [], page["charts"]["intervals"]
    picture = glance_picture(study.title, labels, first)
    contents = {"report.html": render_page(TEMPLATE, page), "glance.svg": picture, "runs.csv": csv_text(study),
                "report.json": json_text(study)}  # fmt: skip
    contents = {name: text for name, text in contents.items() if text}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        write_atomically(folder / name, text)
    return [folder / name for name in contents]


def csv_text(study: Study) -> str:
    """One line per run, including the trials of the search. Metrics are means over the run's steps."""
    output = io.StringIO()
    measured = [name for name, _ in MEASURES]
    heads = ["setting", "variant", "seed", "status", "collapsed", "steps", "start_accuracy", "best_accuracy", *measured,
             "samples", "tokens", "seconds", *CSV_METRICS, "trial", "run_dir", "message"]  # fmt: skip
    writer = csv.DictWriter(output, heads, lineterminator="\n")
    writer.writeheader()
    for run in (*study.runs, *study.trial_runs):
        found = asdict(figures(run))
        row = {key: found[key] for key in heads if key in found}
        row |= {"setting": run.setting, "variant": run.variant, "seed": run.seed, "status": run.status}
        row |= {metric: mean_of(run, metric) for metric in CSV_METRICS}
        row |= {"trial": json.dumps(dict(run.trial)) if run.trial else "", "run_dir": str(run.run_dir)}
        row["message"] = run.message
        writer.writerow({key: _short(value) for key, value in row.items()})
    return output.getvalue()


def json_text(study: Study) -> str:
    """All data of the page, and each run's series with at most 120 points."""
    names = [group.name for group in study.groups]
    content = {
        "title": study.title,
        "command": study.command,
        "base": study.base,
        "shared": study.shared,
        "baseline": study.baseline,
        "seeds": study.seeds,
        "variants": [asdict(group) for group in study.groups],
        "claims": [asdict(claim) for claim in claims(study)],
        "expectations": [asdict(claim) for claim in expectations(study)],
        "settings": [
            {
                **asdict(setting),
                "rows": [asdict(row) for row in rows(study, setting.name)],
                "differences": {
                    measure: {name: asdict(item) for name, item in differences(study, setting.name, measure).items()}
                    for measure, _ in MEASURES
                },
            }
            for setting in study.settings
        ],
        "costs": [asdict(cost) for group in names if (cost := cost_of(group, study.of(BASE, group)))],
        "layers": [asdict(found) for group in names if (found := layers_of(group, study.of(BASE, group)))],
        "route_storage": [asdict(row) for row in estimated_storage(PUBLISHED)],
        "search": {"trials": [asdict(trial) for trial in study.trials], "chosen": study.chosen},
        "runs": [_run(run) for run in (*study.runs, *study.trial_runs)],
        "environment": _environment(study),
    }
    return json.dumps(_plain(content), allow_nan=False, separators=(",", ":")) + "\n"


def _run(run: Run) -> dict[str, Any]:
    curves = {}
    for metric in SERIES:
        steps, values = series(run, metric)
        if steps:
            places = evenly_spaced(range(len(steps)), _POINTS)
            curves[metric] = [[steps[i] for i in places], [values[i] for i in places]]
    return {
        "setting": run.setting, "variant": run.variant, "seed": run.seed, "status": run.status, "message": run.message,
        "trial": dict(run.trial), "figures": asdict(figures(run)), "series": curves,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Numbers with six digits, non-finite values as null, keys as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Path):
        return str(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _short(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _environment(study: Study) -> dict[str, Any]:
    """The environment of the first run without paths and host name, because reports are shared."""
    found = next((dict(run.environment) for run in study.runs if run.environment), {})
    return {key: value for key, value in found.items() if key not in ("command", "host")}
