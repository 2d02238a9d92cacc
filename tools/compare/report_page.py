"""The template context of report.html: all numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.config.rollout_sections import noise_in_words
from megatron_gspo.errors import show_bytes
from megatron_gspo.tools.compare import charts
from megatron_gspo.tools.compare.claims import claims, expectations, p_value, percent
from megatron_gspo.tools.compare.costs import PHASES, PUBLISHED, cost_of, estimated_storage, model_of
from megatron_gspo.tools.compare.dose_response import dose_charts, dose_findings, doses
from megatron_gspo.tools.compare.ratio_plots import Response, clip_band, pick_response
from megatron_gspo.tools.compare.routing_plots import LAYER_FIGURES, layers_of
from megatron_gspo.tools.compare.run_records import Run, mean_of
from megatron_gspo.tools.compare.search import LEARNING_RATE, at_edge
from megatron_gspo.tools.compare.statistics import Difference, Interval
from megatron_gspo.tools.compare.study import MEASURES, Row, Study, differences, flat, rows
from megatron_gspo.tools.compare.study_plan import BASE, argument, arguments_of
from megatron_gspo.tools.svg_panel import COLOURS

TEMPLATE = "compare/report.html"


def context(study: Study) -> dict[str, Any]:
    """What the template shows. Raises ImportError where matplotlib is missing."""
    colours = {group.name: number for number, group in enumerate(study.groups)}
    in_series = {name for rates in doses(study).values() for name in rates.values()}
    return {
        "title": study.title,
        "study": study,
        "colours": colours,
        "palette": COLOURS,
        "phases": PHASES,
        "claims": claims(study),
        "expectations": expectations(study),
        "overview": _overview(study),
        "measured": measured_on(study),
        "stressed": _router_noise(study),
        "headline": _setting_table(study, BASE),
        "charts": charts.base_charts(study, colours),
        "doses": {"charts": dose_charts(study, colours), "findings": dose_findings(study)},
        "layers": _layer_table(study),
        "moved": charts.moved_tokens(study),
        "response": _response(study),
        "costs": _cost_table(study),
        "cost_chart": charts.cost_chart(study),
        "storage": _storage(study),
        "stress": [_stress(study, setting, colours, in_series) for setting in study.settings if setting.name != BASE],
        "search": _search(study),
        "settings": _settings(study),
        "incidents": _incidents(study),
    }


@dataclass(frozen=True)
class TableRow:
    """A row of a headline table, as text. tone: `better`, `worse` or empty, by the corrected test."""

    name: str
    label: str
    runs: str
    cells: list[str]
    difference: str
    p: str
    tone: str


def interval_text(found: Interval | None, scale: float = 100.0, digits: int = 1) -> str:
    """`61.2 [58.0, 64.4]`; without an interval the mean alone."""
    if found is None:
        return "-"
    text = f"{scale * found.mean:.{digits}f}"
    if found.low is None or found.high is None:
        return text
    return f"{text} [{scale * found.low:.{digits}f}, {scale * found.high:.{digits}f}]"


def runs_text(row: Row) -> str:
    """Such as `5 finished, 1 failed, 2 collapsed`."""
    words = {"failed": "failed", "partial": "incomplete", "missing": "missing"}
    parts = [f"{row.counts['finished']} finished"]
    parts += [f"{row.counts[status]} {word}" for status, word in words.items() if row.counts[status]]
    if row.counts["collapsed"]:
        parts.append(f"{row.counts['collapsed']} collapsed")
    return ", ".join(parts)


def _setting_table(study: Study, setting: str) -> list[TableRow]:
    compared = differences(study, setting, "final_accuracy")
    shown = [name for name, _ in MEASURES if name != "clean_accuracy" or _router_noise(study)]
    found = []
    for row in rows(study, setting):
        difference = compared.get(row.group)
        cells = [interval_text(row.measures[name]) for name in shown]
        cells.append(interval_text(row.seconds, 1.0, 0))
        less_baseline, tests = ("baseline", "") if row.group == study.baseline else _difference_text(difference)
        label = study.label(row.group)
        found.append(TableRow(row.group, label, runs_text(row), cells, less_baseline, tests, _tone(difference)))
    return found


def _difference_text(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "-", ""
    text = f"{100 * difference.mean:+.1f}"
    if difference.low is not None and difference.high is not None:
        text += f" [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    tests = f"{p_value(difference.p_t)} / {p_value(difference.p_holm)} / {p_value(difference.p_flip)}"
    return text, tests if difference.p_t is not None else "one seed"


def _tone(difference: Difference | None) -> str:
    if difference is None or not difference.significant:
        return ""
    return "better" if difference.mean > 0 else "worse"


def _overview(study: Study) -> str:
    """One sentence with the numbers of variants, seeds, runs and steps."""
    over = [run for run in (*study.runs, *study.trial_runs) if run.status in ("finished", "failed")]
    steps = {run.config.get("training", {}).get("steps") for run in study.runs if run.config}
    finished = sum(run.status == "finished" for run in over)
    numbers = (("variant", study.groups), ("seed", study.seeds), ("run", over))
    words = [f"{len(found)} {word}{'s' if len(found) != 1 else ''}" for word, found in numbers]
    text = f"{', '.join(words)} ({finished} finished"
    failed = len(over) - finished
    text += f", {failed} failed)" if failed else ")"
    known = sorted(step for step in steps if step)
    if known:
        text += f", {'-'.join(str(step) for step in sorted({known[0], known[-1]}))} rollout batches each"
    return text + "."


def measured_on(study: Study) -> str:
    """Model, task, response length and number of runs, in words."""
    configs = [run.config for run in study.runs if run.config]
    models = _values(configs, "model", "path")
    tasks = _values(configs, "data", "prompts")
    tasks += [str(task["name"]) for config in configs if (task := (config.get("data") or {}).get("task"))]
    lengths = _values(configs, "rollout", "max_response_length")
    steps = _values(configs, "training", "steps")
    words = [f"the model {' or '.join(models) or '?'}", f"the task {' or '.join(dict.fromkeys(tasks)) or '?'}"]
    if lengths:
        words.append(f"responses of at most {' or '.join(lengths)} tokens")
    words.append(f"{' or '.join(steps) or '?'} rollout batches")
    words.append(f"{len(study.seeds)} seed{'s' if len(study.seeds) != 1 else ''}")
    return ", ".join(words)


def _values(configs: Sequence[Mapping[str, Any]], section: str, key: str) -> list[str]:
    """The different values of a key, as text, without null."""
    values = [(config.get(section) or {}).get(key) for config in configs]
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _router_noise(study: Study) -> list[str]:
    """The perturbations of routers that any run was made under, in words: an entry for each choice of engines."""
    rates: dict[str, set[float]] = {}
    strengths: dict[str, set[float]] = {}
    for run in (*study.runs, *study.trial_runs):
        noise = run.config.get("router_noise") or {}
        strength = noise.get("strength")
        if strength is None:
            strength = mean_of(run, "routing/noise_strength")
        engines, rate = noise.get("engines", "none"), noise.get("target_flip_rate")
        rates.setdefault(engines, set()).update(() if rate is None else (100 * rate,))
        strengths.setdefault(engines, set()).update(() if strength is None else (strength,))
    found = []
    for engines in sorted(rates):
        if words := noise_in_words(engines, None, None):
            words += f", {_range(rates[engines])} % of the experts" if rates[engines] else ""
            found.append(words + (f", strength {_range(strengths[engines])}" if strengths[engines] else ""))
    return found


def _range(values: set[float]) -> str:
    lowest, highest = f"{min(values):.3g}", f"{max(values):.3g}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _layer_table(study: Study) -> dict[str, Any]:
    found = [layers for group in study.groups if (layers := layers_of(group.name, study.of(BASE, group.name)))]
    depth = max((len(values) for item in found for values in item.figures.values()), default=0)
    lines = []
    for item in found:
        for name, words in LAYER_FIGURES:
            if name in item.figures:
                show = (lambda v: f"{v:.3f}") if name == "entropy" else (lambda v: percent(v, 2))
                lines.append((study.label(item.variant), words, [show(value) for value in item.figures[name]]))
        if item.largest_load:
            lines.append((study.label(item.variant), "busiest expert's share", [percent(v) for v in item.largest_load]))
    return {"depth": depth, "rows": lines}


def _response(study: Study) -> dict[str, Any] | None:
    """The token strip: of the baseline's first run with ratios, with the clip ranges of GRPO and GSPO in the report."""
    ranges = charts.clip_ranges(study)
    for run in study.of(BASE, study.baseline) + [run for run in study.runs if run.setting == BASE]:
        found = pick_response(run, ranges.get("grpo", (0.2, 0.27)), ranges.get("gspo", (3e-4, 4e-4)))
        if found is not None:
            return {"found": found, "tokens": [_token(token, found) for token in found.tokens], "of": _of(study, run)}
    return None


def _of(study: Study, run: Run) -> str:
    return f"{study.label(run.variant)}, seed {run.seed}"


def _token(token: Any, response: Response) -> dict[str, Any]:
    """Text and colour; strength is the distance of the ratio from 1, relative to the largest of the response."""
    most = max(max(abs(t.ratio - 1) for t in response.tokens), 1e-9)
    return {
        "text": {" ": "\u2423", "\n": "\u21b5", "": "\u2205"}.get(token.text, token.text),
        "ratio": f"{token.ratio:.3f}",
        "side": "up" if token.ratio >= 1 else "down",
        "strength": round(abs(token.ratio - 1) / most, 2),
        "cut": token.cut,
        "flipped": token.flipped,
    }


def _cost_table(study: Study) -> list[dict[str, Any]]:
    found = []
    base = cost_of(study.baseline, study.of(BASE, study.baseline))
    for group in study.groups:
        cost = cost_of(group.name, study.of(BASE, group.name))
        if cost is None:
            continue
        change = f"{100 * (cost.step.mean / base.step.mean - 1):+.1f} %" if base else "-"
        found.append({
            "name": group.name,
            "label": group.label,
            "step": interval_text(cost.step, 1.0, 3),
            "change": change if group.name != study.baseline else "baseline",
            "seconds": {name: f"{cost.seconds[name]:.3f}" if name in cost.seconds else "-" for name, _ in PHASES},
            "memory": f"{cost.memory_gib:.2f} GiB" if cost.memory_gib else "-",
            "stored": show_bytes(cost.replay_bytes) if cost.replay_bytes else "-",
            "per_token": f"{cost.replay_bytes_per_token:.2f}" if cost.replay_bytes_per_token else "-",
            "moved": show_bytes(cost.bytes_moved) if cost.bytes_moved else "-",
        })  # fmt: skip
    return found


def _storage(study: Study) -> list[dict[str, Any]]:
    config: dict[str, Any] = next((run.config for run in study.runs if run.config), {})
    own = model_of(config, "the compared model")
    return [
        {
            "name": row.model.name,
            "sum": f"{row.model.layers} x {row.model.experts_per_token} x {row.model.bytes_per_expert_id}",
            "per_token": f"{row.bytes_per_token} bytes",
            "tokens": f"{row.tokens:,}",
            "batch": show_bytes(row.batch_bytes),
            "log_probs": show_bytes(row.log_prob_bytes),
        }
        for row in estimated_storage([*([own] if own else []), *PUBLISHED])
    ]


def _stress(study: Study, setting: Any, colours: dict[str, int], in_series: set[str]) -> dict[str, Any]:
    """in_series: settings that the charts of `doses` show together; they have none of their own."""
    return {
        "setting": setting,
        "overrides": arguments_of(setting.overrides),
        "table": _setting_table(study, setting.name),
        "seeds": sorted({run.seed for run in study.runs if run.setting == setting.name}),
        "charts": [] if setting.name in in_series else charts.stress_charts(study, setting.name, colours),
    }


def _search(study: Study) -> dict[str, Any] | None:
    """One grid per variant: clip ranges as rows, learning rates as columns."""
    if not study.trials:
        return None
    grids = []
    for name in dict.fromkeys(trial.variant for trial in study.trials):
        trials = [trial for trial in study.trials if trial.variant == name]
        rates = list(dict.fromkeys(trial.values[LEARNING_RATE] for trial in trials))
        lines: dict[str, list[Any]] = {}
        for trial in trials:
            lines.setdefault(_tried(trial.values), []).append(trial)
        grids.append({"label": study.label(name), "rates": [f"{rate:g}" for rate in rates], "lines": lines})
    steps = sorted({run.config.get("training", {}).get("steps") or 0 for run in study.trial_runs if run.config})
    per_variant = len([t for t in study.trials if t.variant == study.trials[0].variant])
    return {
        "grids": grids,
        "trials": per_variant,
        "seeds": sorted({run.seed for run in study.trial_runs}),
        "steps": "-".join(str(step) for step in steps) or "?",
        "runs": len(study.trial_runs),
        "overrides": arguments_of(study.search_overrides),
        "edge": [study.label(name) for name in at_edge(study.trials)],
        "borrowed": [(study.label(name), study.label(other)) for name, other in study.tuned_as.items()],
    }  # fmt: skip


def _tried(values: Mapping[str, Any]) -> str:
    """A row of a search's grid: its clip range, or the other keys that it tries with each learning rate."""
    low, high = values.get("algorithm.epsilon_low"), values.get("algorithm.epsilon_high")
    if low is not None and high is not None:
        return f"{low:g} / {high:g}"
    tried = {key.rpartition(".")[2]: value for key, value in values.items() if key != LEARNING_RATE}
    return ", ".join(f"{key} {argument(value)}" for key, value in tried.items())


def _settings(study: Study) -> dict[str, Any]:
    runs = [run for run in study.runs if run.config]
    environments = [run.environment for run in runs if run.environment]
    versions: dict[str, list[str]] = {}
    for environment in environments:
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
    first = runs[0].config if runs else {}
    return {
        "shared": arguments_of(study.shared),
        "groups": [(group, _in_force(study, group.name), arguments_of(group.overrides)) for group in study.groups],
        "versions": {key: ", ".join(values) for key, values in versions.items()},
        "resolved": [(key, argument(value)) for key, value in flat(first).items() if key not in ("run_dir", "seed")],
    }


def _in_force(study: Study, name: str) -> list[str]:
    """Clip range and learning rate that a variant ran with."""
    config = next((run.config for run in study.of(BASE, name) if run.config), None)
    if config is None:
        return ["-", "-"]
    band = clip_band(config)
    rate = config.get("optimizer", {}).get("lr")
    return ["-" if band is None else f"{band[0]:g} / {band[1]:g}", "-" if rate is None else f"{rate:g}"]


def _incidents(study: Study) -> list[str]:
    """Failed, incomplete and missing runs, by name."""
    found = []
    for run in (*study.runs, *study.trial_runs):
        where = " ".join(f"{key.rpartition('.')[2]}={value:g}" for key, value in run.trial.items())
        name = f"{run.name} {where}".strip()
        if run.status == "failed":
            last = int(run.records[-1]["step"]) if run.records else 0
            found.append(f"{name}: failed after step {last}: {run.message}")
        elif run.status != "finished":
            found.append(f"{name}: {'incomplete' if run.status == 'partial' else 'missing'}")
    return found
