"""Expert flips and router balance of a variant's runs, by layer, from routing.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gspo.tools.compare.run_records import Run
from megatron_gspo.tracking.run_directory import read_metrics

LAYER_FIGURES = (
    ("flip_rate", "experts changed by the updates"),
    ("rollout_flip_rate", "experts that differ between engines"),
    ("entropy", "router entropy, nats"),
)


@dataclass(frozen=True)
class Layers:
    """Means over all steps and runs, one entry a MoE layer. largest_load: share of the busiest expert."""

    variant: str
    figures: dict[str, list[float]]
    largest_load: list[float]


def layers_of(variant: str, runs: Sequence[Run]) -> Layers | None:
    """None where no run wrote routing.jsonl."""
    records = [
        record for run in runs if (file := run.run_dir / "routing.jsonl").is_file() for record in read_metrics(file)
    ]
    found = {}
    for name, _ in LAYER_FIGURES:
        rows = [record[name] for record in records if record.get(name) and None not in record[name]]
        if rows:
            found[name] = np.mean(np.asarray(rows, dtype=np.float64), axis=0).tolist()
    loads = [np.max(np.asarray(record["load"], dtype=np.float64), axis=1) for record in records if record.get("load")]
    if not found and not loads:
        return None
    return Layers(variant, found, np.mean(loads, axis=0).tolist() if loads else [])
