"""The search of clip range and learning rate: its table, and what each algorithm is compared with afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.tools.compare.run_records import Run, figures
from megatron_gspo.tools.compare.study_plan import ComparisonConfig

LEARNING_RATE = "optimizer.lr"


@dataclass(frozen=True)
class Trial:
    """One point of one variant's grid: mean last accuracy over the search seeds, None where a seed is missing."""

    variant: str
    values: dict[str, Any]
    accuracy: float | None
    by_seed: dict[int, float | None]
    failed: int
    chosen: bool


def table(runs: Sequence[Run]) -> list[Trial]:
    """Every trial in the order of the grid, the best of each variant marked.

    Best is the highest mean of the last held-out accuracy; of equal ones the first. A trial that failed counts with the
    accuracy that it had last; one with a seed missing can't be chosen.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.variant, json.dumps(dict(run.trial), sort_keys=True)), []).append(run)
    rows = [_trial(group) for group in groups.values()]
    best: dict[str, Trial] = {}
    for row in rows:
        if row.accuracy is not None and (row.variant not in best or row.accuracy > (best[row.variant].accuracy or 0.0)):
            best[row.variant] = row
    return [Trial(**{**vars(row), "chosen": row is best.get(row.variant)}) for row in rows]


def choices(config: ComparisonConfig, trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
    """The chosen values of each variant, `tuned_as` followed; a variant without a whole trial is left out."""
    found = {trial.variant: dict(trial.values) for trial in trials if trial.chosen}
    for variant in config.variants:
        if variant.tuned_as is not None and variant.tuned_as in found:
            found[variant.name] = dict(found[variant.tuned_as])
    return found


def at_edge(trials: Sequence[Trial]) -> list[str]:
    """Variants whose chosen learning rate is the smallest or largest that was tried (of at least two)."""
    found = []
    for trial in trials:
        if trial.chosen:
            rates = sorted({other.values[LEARNING_RATE] for other in trials if other.variant == trial.variant})
            if len(rates) > 1 and trial.values[LEARNING_RATE] in (rates[0], rates[-1]):
                found.append(trial.variant)
    return found


def _trial(runs: Sequence[Run]) -> Trial:
    by_seed = {run.seed: figures(run).final_accuracy if run.status in ("finished", "failed") else None for run in runs}
    known = [value for value in by_seed.values() if value is not None]
    mean = sum(known) / len(known) if len(known) == len(by_seed) else None
    failed = sum(run.status == "failed" for run in runs)
    values: Mapping[str, Any] = runs[0].trial
    return Trial(runs[0].variant, dict(values), mean, by_seed, failed, chosen=False)
