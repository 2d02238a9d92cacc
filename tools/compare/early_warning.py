"""Which metrics announce a decline of the held-out accuracy, how many steps before, and how often without one.

A run declines if its accuracy ends below that before the first step.

    python -m megatron_gspo.tools.compare.early_warning FOLDER ... [--json FILE]

FOLDER holds run directories at any depth. For each metric the rule (a threshold, and for how many steps in a row) is
chosen on the runs with odd seeds and tested on those with even seeds. The last line is what `guard` does with its
defaults on all runs.

example: python -m megatron_gspo.tools.compare.early_warning runs/collapse/runs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.errors import UserError, report
from megatron_gspo.loop.collapse_guard import count_low_steps, guard_metrics
from megatron_gspo.tools.compare.run_records import ReportError, Run, read_run, series

ROWS = (1, 2, 3, 5)  # steps in a row that are tried
_THRESHOLDS = 60  # values of a metric that are tried
# Metric, and whether low values are the alarming ones.
CANDIDATES = {
    "effective_sample_size": True,
    "ratio_token/outside_band": False,
    "ratio_token/p99": False,
    "ratio_token/p01": True,
    "kl/old_policy": False,
    "grad_norm": False,
    "clip_fraction/tokens": False,
    "entropy": True,
    "mismatch/outside_band": False,
    "mismatch/k3": False,
    "routing/flip_rate": False,
    "routing/rollout_flip_rate": False,
}


@dataclass(frozen=True)
class Rule:
    """Alarm after `steps` steps in a row with a metric below (or above) a threshold."""

    metric: str
    below: bool
    threshold: float
    steps: int

    def __str__(self) -> str:
        sign = "<" if self.below else ">"
        return f"{self.metric} {sign} {self.threshold:g}" + (f" for {self.steps} steps" if self.steps > 1 else "")


@dataclass(frozen=True)
class Outcome:
    """A rule on some runs. announced: of the declined runs, with the alarm before the decline was seen; leads: their
    steps between the two. false: alarms in runs without a decline."""

    declined: int
    announced: int
    leads: list[int]
    healthy: int
    false: int

    @property
    def score(self) -> float:
        """Share announced less share of false alarms (Youden's J), in [-1, 1]."""
        return self.announced / max(self.declined, 1) - self.false / max(self.healthy, 1)

    @property
    def lead(self) -> float:
        """Median lead in steps, 0 without any."""
        return statistics.median(self.leads) if self.leads else 0.0


@dataclass(frozen=True)
class Finding:
    """A metric's rule, and what it did on the runs that it was chosen on and on the others."""

    rule: Rule
    chosen_on: Outcome
    tested_on: Outcome


def decline(run: Run) -> int | None:
    """The step of the first evaluation from which on the accuracy is below that of the first one; None if the last one
    is not."""
    steps, accuracy = series(run, "eval/accuracy")
    first = None
    for step, value in zip(steps, accuracy, strict=True):
        if value >= accuracy[0]:
            first = None  # it recovered
        elif first is None:
            first = int(step)
    return first


def alarm(run: Run, rule: Rule) -> int | None:
    """The first step at which the rule holds."""
    row = 0
    for step, value in zip(*series(run, rule.metric), strict=True):
        beyond = value < rule.threshold if rule.below else value > rule.threshold
        row = row + 1 if beyond else 0
        if row == rule.steps:
            return int(step)
    return None


def guard_alarm(run: Run, guard: GuardConfig) -> int | None:
    """The first step at which the guard warns."""
    row = 0
    for record in run.records:
        metrics = {name: value for name, value in record.items() if value is not None}
        row = count_low_steps(guard, metrics, row)
        if guard_metrics(guard, metrics, row).get("guard/alarm"):
            return int(record["step"])
    return None


def default_guard(run: Run) -> GuardConfig:
    """`guard` with its defaults, for the run's algorithm."""
    return GuardConfig().for_algorithm(AlgorithmConfig.preset(**run.config.get("algorithm", {})))


def outcome(runs: Sequence[Run], alarms: Sequence[int | None]) -> Outcome:
    """What the alarms of runs are worth."""
    declines = [decline(run) for run in runs]
    pairs = list(zip(declines, alarms, strict=True))
    leads = [down - at for down, at in pairs if down is not None and at is not None and at < down]
    healthy = [at for down, at in pairs if down is None]
    return Outcome(len(runs) - len(healthy), len(leads), leads, len(healthy), sum(at is not None for at in healthy))


def _outcome_of(rule: Rule, runs: Sequence[Run]) -> Outcome:
    return outcome(runs, [alarm(run, rule) for run in runs])


def choose(runs: Sequence[Run], metric: str, below: bool) -> Rule | None:
    """The rule with the best score; of equal ones the one with the longer lead. None if no run has the metric."""
    found = np.concatenate([series(run, metric)[1] for run in runs] or [[]])
    if not found.size:
        return None
    values = sorted({float(f"{value:.2g}") for value in np.quantile(found, np.linspace(0, 1, _THRESHOLDS))})
    rules = [Rule(metric, below, value, steps) for value in values for steps in ROWS]
    results = [_outcome_of(rule, runs) for rule in rules]
    best = max(range(len(rules)), key=lambda i: (results[i].score, results[i].lead))
    return rules[best]


def findings(runs: Sequence[Run]) -> list[Finding]:
    """Of every metric that the runs have, the best on the tested runs first."""
    chosen_on = [run for run in runs if run.seed % 2]
    tested_on = [run for run in runs if not run.seed % 2]
    found = []
    for metric, below in CANDIDATES.items():
        rule = choose(chosen_on, metric, below)
        if rule is not None:
            found.append(Finding(rule, _outcome_of(rule, chosen_on), _outcome_of(rule, tested_on)))
    return sorted(found, key=lambda f: (f.tested_on.score, f.tested_on.lead), reverse=True)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The finished and failed runs below the folders. Raises ReportError where there is none."""
    files = sorted(file for folder in folders for file in folder.rglob("metrics.jsonl"))
    runs = [read_run(file.parent, setting="", variant="") for file in files]
    over = [run for run in runs if run.status in ("finished", "failed") and series(run, "eval/accuracy")[0]]
    if not over:
        names = ", ".join(map(str, folders))
        raise ReportError(f"{names}: no finished run with a held-out accuracy; give the folder of a comparison")
    return over


def table(found: Sequence[Finding]) -> str:
    """A Markdown table of the tested runs."""
    lines = ["| rule | announced | median lead, steps | false alarms |", "| --- | --- | --- | --- |"]
    for finding in found:
        tested = finding.tested_on
        lines.append(
            f"| {finding.rule} | {tested.announced} of {tested.declined} | {tested.lead:g} | "
            f"{tested.false} of {tested.healthy} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_gspo.tools.compare.early_warning", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rules and their outcomes here too")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        alarms = [guard_alarm(run, default_guard(run)) for run in runs]
    except UserError as error:
        return report(error)
    found = findings(runs)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(finding) for finding in found], indent=1) + "\n", encoding="utf-8")
    print(table(found))
    of_guard = outcome(runs, alarms)
    print(f"\nguard, all runs: {of_guard.announced} of {of_guard.declined} announced, median lead {of_guard.lead:g} "
          f"steps, {of_guard.false} of {of_guard.healthy} false alarms")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
