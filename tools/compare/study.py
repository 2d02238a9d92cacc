"""The runs of a comparison by variant and seed, their figures, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_gspo.tools.compare.run_records import Run, figures, read_run
from megatron_gspo.tools.compare.statistics import (
    Difference,
    Interval,
    holm,
    interval,
    paired_difference,
)
from megatron_gspo.tools.compare.study_plan import Comparison, Variant, planned_runs

# The measure that the verdicts are about, of Figures.
PRIMARY = "final_accuracy"


@dataclass(frozen=True)
class Study:
    """All that a report is made of.

    runs: missing ones included. base: file of the training config. overrides: keys that every run
    sets beyond it. command: makes the report again.
    """

    title: str
    variants: Sequence[Variant]
    seeds: Sequence[int]
    baseline: str
    runs: Sequence[Run]
    command: str
    base: str
    overrides: dict[str, Any]

    def runs_of(self, variant: str) -> list[Run]:
        return [run for run in self.runs if run.variant == variant]

    def label(self, name: str) -> str:
        return next(
            (each.label for each in self.variants if each.name == name and each.label), name
        )


def read_study(comparison: Comparison, command: str) -> Study:
    """The runs of a comparison file as they lie in its folder, finished or not."""
    config = comparison.config
    specs = planned_runs(comparison)
    return Study(
        title=config.title,
        variants=config.variants,
        seeds=config.seeds,
        baseline=config.baseline,
        runs=[read_run(spec.run_dir, variant=spec.variant, seed=spec.seed) for spec in specs],
        command=command,
        base=str(comparison.base_file),
        overrides=dict(config.overrides),
    )


def values(study: Study, variant: str, measure: str) -> dict[int, float]:
    """A figure by seed. A failed run counts with what it had last; one that isn't over doesn't
    count.
    """
    by_seed = {}
    for run in study.runs_of(variant):
        value = getattr(figures(run), measure) if run.is_over else None
        if value is not None:
            by_seed[run.seed] = float(value)
    return by_seed


def mean_value(study: Study, variant: str, measure: str) -> Interval | None:
    """Mean over the seeds; None without a run that is over."""
    known = list(values(study, variant, measure).values())
    return interval(known) if known else None


def differences(study: Study, measure: str) -> dict[str, Difference]:
    """Each variant less the baseline, paired by seed; Holm's correction over the variants."""
    baseline = values(study, study.baseline, measure)
    compared = {}
    for variant in study.variants:
        if variant.name != study.baseline:
            difference = paired_difference(values(study, variant.name, measure), baseline)
            if difference is not None:
                compared[variant.name] = difference
    adjusted = holm([difference.p_t for difference in compared.values()])
    return {
        name: replace(difference, p_holm=p)
        for (name, difference), p in zip(compared.items(), adjusted, strict=True)
    }


def verdict_of(difference: Difference | None) -> str:
    """`higher`, `lower` or `no difference shown`, by the corrected paired t-test at 5 %."""
    if difference is None:
        return "no seed in common"
    if difference.p_holm is None:
        return "one seed"
    if not difference.significant:
        return "no difference shown"
    return "higher" if difference.mean > 0 else "lower"


def run_counts(runs: Sequence[Run]) -> str:
    """Such as `5 finished, 1 failed, 2 collapsed`."""
    counts = {
        "finished": sum(run.status == "finished" for run in runs),
        "failed": sum(run.status == "failed" for run in runs),
        "incomplete": sum(run.status == "partial" for run in runs),
        "missing": sum(run.status == "missing" for run in runs),
        "collapsed": sum(run.is_over and figures(run).collapsed for run in runs),
    }
    return ", ".join(
        f"{count} {name}" for name, count in counts.items() if count or name == "finished"
    )
