"""Which charts the report has, and the data of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron_gspo.tools.compare import drawing as draw
from megatron_gspo.tools.compare.claims import find
from megatron_gspo.tools.compare.costs import PHASES, cost_of
from megatron_gspo.tools.compare.ratio_plots import Spread, clip_band, spread_of
from megatron_gspo.tools.compare.run_records import Run, against, positions, series
from megatron_gspo.tools.compare.statistics import Band, Interval, band
from megatron_gspo.tools.compare.study import Study, differences, rows
from megatron_gspo.tools.compare.study_plan import BASE
from megatron_gspo.tracking import run_directory
from megatron_gspo.tracking.plots import smooth

_POINTS = 60  # of a curve; more make the page larger, not clearer
_WINDOW = 5  # steps that a point of a noisy curve is the mean of
_AXES = (("samples", "samples (responses)"), ("tokens", "tokens"), ("seconds", "training time, s"))
_FLOOR = 1e-4  # of the log scales: 0.01 %

_SMALLEST_NORM = 1e-2
_GEOMETRIC = {"grad_norm"}  # metrics with geometric means

Chart = str  # an SVG


class _Metric(NamedTuple):
    """window: steps of the trailing mean."""

    name: str
    title: str
    percent: bool = True
    window: int = _WINDOW


_ACCURACY = _Metric("eval/accuracy", "Held-out accuracy", window=1)
_REWARD = _Metric("reward/mean", "Training reward", percent=False)
# (metric, title, percent, log floor)
_CLIPPING = (
    ("clip_fraction/tokens", "Clipped tokens", True, _FLOOR),
    ("clip_fraction/sequences", "Clipped sequences", True, _FLOOR),
)
_FLIPS = ("routing/flip_rate", "Experts changed by the updates", True, None)
_SAMPLE_SIZE = ("effective_sample_size", "Effective sample size", True, None)
_GRADIENT = ("grad_norm", "Gradient norm", False, _SMALLEST_NORM)
_ROUTING = (
    _FLIPS,
    ("routing/flipped_tokens", "Tokens with a flipped expert", True, None),
    ("routing/rollout_flip_rate", "Experts that differ, rollout and training", True, None),
    ("routing/entropy", "Router entropy, nats", False, None),
    ("routing/load_imbalance", "Busiest expert / mean load", False, None),
)
_RATIOS = (
    _SAMPLE_SIZE,
    ("kl/old_policy", "KL(old, current), nats per token", False, None),
    ("entropy", "Policy entropy, nats per token", False, None),
    _GRADIENT,
)


def base_charts(study: Study, colours: Mapping[str, int]) -> dict[str, list[Chart]]:
    """By section of the page; a section without data has an empty list."""
    return {
        "glance": glance(study, BASE, colours),
        "intervals": _interval_charts(study, colours),
        "accuracy": [_curve(study, BASE, colours, _ACCURACY, axis) for axis in _AXES],
        "reward": [_curve(study, BASE, colours, _REWARD, axis) for axis in _AXES],
        "clipping": _by_step(study, BASE, colours, _CLIPPING),
        "routing": _by_step(study, BASE, colours, _ROUTING),
        "policy": _by_step(study, BASE, colours, _RATIOS),
        "ratios": _histograms(study, colours),
    }  # fmt: skip


def glance(study: Study, setting: str, colours: Mapping[str, int]) -> list[Chart]:
    """Whether a setting's runs learn or collapse, in four pictures."""
    accuracy = _curve(study, setting, colours, _ACCURACY, _AXES[0])
    return [accuracy] * bool(accuracy) + _by_step(study, setting, colours, (_SAMPLE_SIZE, _FLIPS, _GRADIENT))


def stress_charts(study: Study, setting: str, colours: Mapping[str, int]) -> list[Chart]:
    reward = _curve(study, setting, colours, _REWARD, _AXES[0])
    clipping = _by_step(study, setting, colours, (_CLIPPING[0], _ROUTING[1]))
    return glance(study, setting, colours) + [reward] * bool(reward) + clipping


def cost_chart(study: Study) -> dict[str, Any] | None:
    """The bars and their legend: (phase, colour's number) of the phases that any variant has."""
    costs = [found for group in study.groups if (found := cost_of(group.name, study.of(BASE, group.name)))]
    if not costs:
        return None
    parts = [
        (number, words, [cost.seconds.get(name, 0.0) for cost in costs])
        for number, (name, words) in enumerate(PHASES)
        if any(name in cost.seconds for cost in costs)
    ]
    labels = [study.label(cost.variant) for cost in costs]
    return {"svg": draw.cost_panel(labels, [(number, seconds) for number, _, seconds in parts]),
            "legend": [(words, number) for number, words, _ in parts]}  # fmt: skip


def clip_ranges(study: Study) -> dict[str, tuple[float, float]]:
    """The clip range that GRPO and GSPO ran with, by algorithm name, as far as they are there."""
    found = {}
    for name in ("grpo", "gspo"):
        group = find(study, name=name)
        run = next((run for run in study.runs if run.variant == group and run.config), None)
        if run is not None:
            clip = clip_band(run.config)
            assert clip is not None  # of the two names
            found[name] = clip
    return found


def spreads(study: Study) -> list[Spread]:
    """Ratios of every variant that recorded some, without stress."""
    return [found for group in study.groups if (found := spread_of(group.name, study.of(BASE, group.name)))]


def moved_tokens(study: Study) -> list[dict[str, str]]:
    """Mean |log-ratio| of tokens with and without an expert flip, as text."""
    found = []
    for spread in spreads(study):
        if spread.token_flipped is not None and spread.token_same is not None:
            found.append({
                "label": study.label(spread.variant),
                "step": str(spread.step),
                "share": f"{100 * (spread.flipped or 0.0):.1f} %",
                "flipped": f"{spread.token_flipped:.4f}",
                "same": f"{spread.token_same:.4f}",
                "factor": f"{spread.token_flipped / spread.token_same:.2f}" if spread.token_same else "-",
            })  # fmt: skip
    return found


def _interval_charts(study: Study, colours: Mapping[str, int]) -> list[Chart]:
    table = rows(study, BASE)
    ends = [(colours[row.group], study.label(row.group), row.measures["final_accuracy"]) for row in table]
    ends.sort(key=lambda end: -math.inf if end[2] is None else end[2].mean, reverse=True)
    compared = differences(study, BASE, "final_accuracy")
    gaps = [
        (colours[name], study.label(name), Interval(item.mean, item.low, item.high, item.count))
        for name, item in compared.items()
    ]
    gaps.sort(key=lambda gap: gap[2].mean, reverse=True)
    charts = []
    if any(found for *_, found in ends):
        charts.append(draw.interval_panel("Accuracy at the end", "%, mean and 95 % t-interval", ends))
    if gaps:
        charts.append(
            draw.interval_panel(
                "Difference from the baseline", "points, paired by seed, 95 % t-interval", gaps, zero=True
            )
        )
    return charts


def _curve(
    study: Study, setting: str, colours: Mapping[str, int], metric: _Metric, along: tuple[str, str]
) -> Chart:
    """One metric along an axis of progress (its name and label); empty text if no run has it."""
    (axis, label), lines = along, []
    for group in study.groups_in(setting):
        runs = study.of(setting, group.name)
        by_step = band([_prepared(series(run, metric.name), metric.window) for run in runs], _POINTS)
        found = replace(by_step, x=_places(runs, axis, by_step.x))
        failed = [against(run, metric.name, axis) for run in runs if run.status == "failed"]
        lines.append(draw.Line(colours[group.name], found, [(x[-1], y[-1]) for x, y in failed if x]))
    if not any(line.band.x for line in lines):
        return ""
    return draw.band_panel(metric.title, label, lines, percent=metric.percent)


def _places(runs: Sequence[Run], axis: str, steps: Sequence[float]) -> list[float]:
    """Where steps lie on an axis: the mean over the runs that came so far."""
    known = [where for run in runs if (where := positions(run, axis))]
    found = []
    for step in steps:
        there = [np.interp(step, list(where), list(where.values())) for where in known if max(where) >= step]
        found.append(float(np.mean(there)))
    return found


def _by_step(study: Study, setting: str, colours: Mapping[str, int], panels: Any) -> list[Chart]:
    found = []
    for metric, title, percent, floor in panels:
        lines = []
        for group in study.groups_in(setting):
            curves = [series(run, metric) for run in study.of(setting, group.name)]
            shape = _geometric_band(curves) if metric in _GEOMETRIC else _band(curves)
            lines.append(draw.Line(colours[group.name], shape))
        if any(line.band.x for line in lines):
            found.append(draw.band_panel(title, "step", lines, percent=percent, log_floor=floor))
    return found


def _band(curves: Sequence[tuple[list[float], list[float]]]) -> Band:
    return band([_prepared(curve, _WINDOW) for curve in curves], _POINTS)


def _geometric_band(curves: Sequence[tuple[list[float], list[float]]]) -> Band:
    """The band of the logarithms: a single step with a norm of a thousand would hide all others in a mean."""
    logs = [(x, [math.log(max(value, _SMALLEST_NORM)) for value in y]) for x, y in curves]
    found = _band(logs)
    mean, low, high = ([math.exp(value) for value in values] for values in (found.mean, found.low, found.high))
    return replace(found, mean=mean, low=low, high=high)


def _prepared(curve: tuple[list[float], list[float]], window: int) -> tuple[list[float], list[float]]:
    """A curve to draw: trailing means over `window` points, at most _POINTS of them."""
    x, y = curve
    means = smooth(y, window)
    places = run_directory.evenly_spaced(range(len(x)), _POINTS)
    return [x[i] for i in places], [means[i] for i in places]


def _histograms(study: Study, colours: Mapping[str, int]) -> list[Chart]:
    found = spreads(study)
    if not found:
        return []
    reach = _reach(found)
    ranges = clip_ranges(study)
    charts = []
    for spread in found:
        bands = {draw.OWN_RANGE: spread.band} if spread.band else {}
        for name, other in ranges.items():
            if other != spread.band:
                bands[f"{name.upper()}'s"] = other
        title = f"{study.label(spread.variant)}, step {spread.step}"
        charts.append(draw.histogram_panel(title, spread.token, spread.sequence, bands, colours[spread.variant], reach))
    return charts


def _reach(found: list[Spread]) -> float:
    """Half the width of the histograms in log-ratio: nearly all tokens, and the clip ranges, between 0.02 and 1."""
    tail = max(float(np.quantile(np.abs(spread.token), 0.98)) for spread in found)
    widest = max((math.log1p(spread.band[1]) for spread in found if spread.band), default=0.0)
    return min(1.0, max(0.02, tail, 1.3 * widest))
