"""Accuracy against the strength of the routers' noise, and from which strength on a variant differs from the baseline.

A stress setting with `router_noise.target_flip_rate` is a dose; settings with the same `router_noise.engines` form a
series. Runs without stress are the dose 0 of every series, if they have no noise.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gspo.config.rollout_sections import NOISY_ENGINES
from megatron_gspo.tools.compare import drawing as draw
from megatron_gspo.tools.compare.claims import PRIMARY, describe
from megatron_gspo.tools.compare.statistics import Band, Difference, interval
from megatron_gspo.tools.compare.study import Study, differences, values
from megatron_gspo.tools.compare.study_plan import BASE

_ENGINES, _RATE = "router_noise.engines", "router_noise.target_flip_rate"
_FEWEST = 2  # doses of a series


def doses(study: Study) -> dict[str, dict[float, str]]:
    """Name of the setting by flip rate, ascending, by the perturbed engines."""
    found: dict[str, dict[float, str]] = {}
    for setting in study.settings:
        if _RATE in setting.overrides and setting.overrides.get(_ENGINES, "none") != "none":
            found.setdefault(setting.overrides[_ENGINES], {})[float(setting.overrides[_RATE])] = setting.name
    clean = {0.0: BASE} if study.shared.get(_ENGINES) == "none" else {}
    series = {engines: clean | dict(sorted(rates.items())) for engines, rates in found.items()}
    return {engines: rates for engines, rates in series.items() if len(rates) >= _FEWEST}


def dose_charts(study: Study, colours: Mapping[str, int]) -> list[str]:
    """Accuracy at the end against the flip rate: an SVG a series, and one of the accuracy without noise where the
    rollout engine has noise."""
    charts = []
    for engines, rates in doses(study).items():
        for measure in _measures(engines):
            curves = {group.name: _curve(study, group.name, rates, measure) for group in study.groups}
            lines = [draw.Line(colours[name], curve) for name, curve in curves.items()]
            if any(line.band.x for line in lines):
                charts.append(draw.band_panel(_words(engines, measure), "experts that differ, %", lines, percent=True))
    return charts


def dose_findings(study: Study) -> list[str]:
    """One sentence for each series, measure and variant: from which flip rate on it differs from the baseline.

    Differs: Holm's corrected p of the paired difference is below 5 %, at this rate and all higher ones, with one sign.
    """
    found = []
    for engines, rates in doses(study).items():
        for measure in _measures(engines):
            compared = {rate: differences(study, setting, measure) for rate, setting in rates.items()}
            for group in study.groups:
                by_rate = {rate: table[group.name] for rate, table in compared.items() if group.name in table}
                if group.name != study.baseline and by_rate:
                    words = _words(engines, measure)
                    found.append(f"{words}: {study.label(group.name)} {_finding(study, by_rate)}.")
    return found


def _measures(engines: str) -> tuple[str, ...]:
    return (PRIMARY, "clean_accuracy") if engines in ("rollout", "both") else (PRIMARY,)


def _words(engines: str, measure: str) -> str:
    words = f"Noise in {NOISY_ENGINES[engines]}"
    return words if measure == PRIMARY else f"{words}, none in evaluation"


def _finding(study: Study, by_rate: Mapping[float, Difference]) -> str:
    baseline, apart = study.label(study.baseline), None
    for rate in sorted(by_rate, reverse=True):
        difference = by_rate[rate]
        same_sign = apart is None or (difference.mean > 0) == (by_rate[apart].mean > 0)
        if not (difference.significant and same_sign):
            break
        apart = rate
    if apart is None:
        highest = max(by_rate)
        return (f"can't be told from {baseline} at the highest rate, {100 * highest:g} %: "
                f"{describe(by_rate[highest])}")  # fmt: skip
    place = "at every rate" if apart == min(by_rate) else f"from {100 * apart:g} % on"
    side = "above" if by_rate[apart].mean > 0 else "below"
    return f"ends {side} {baseline} {place}: {describe(by_rate[apart])} at {100 * apart:g} %"


def _curve(study: Study, group: str, rates: Mapping[float, str], measure: str) -> Band:
    """Mean of the measure and its interval, by flip rate in per cent."""
    known = {rate: list(values(study, setting, group, measure).values()) for rate, setting in rates.items()}
    points = [(100 * rate, interval(found)) for rate, found in known.items() if found]
    return Band(
        [x for x, _ in points],
        [item.mean for _, item in points],
        [item.mean if item.low is None else item.low for _, item in points],
        [item.mean if item.high is None else item.high for _, item in points],
        [item.count for _, item in points],
    )
