"""Figures of the ready configs, rehearsed: ``benchmarks/results/rehearsals.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.family_pages.facts import EXAMPLES, ROOT
from benchmarks.family_pages.ready_configs import ReadyConfig
from benchmarks.result_files import save
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.rehearse.rank_processes import RankJob, default_jobs, rehearse_ranks
from megatron_gspo.tools.rehearse.records import RankRecord
from megatron_gspo.tools.rehearse.roles import choose_ranks
from megatron_gspo.tools.rehearse.step_figures import StepFigures, step_figures

RESULTS = ROOT / "benchmarks" / "results" / "rehearsals.json"


@dataclass(frozen=True)
class Rehearsed:
    """One config. setting: what the figures depend on, see `setting_of`. ranks: that were
    rehearsed.
    """

    setting: dict[str, Any]
    ranks: tuple[int, ...]
    figures: StepFigures


def setting_of(ready: ReadyConfig) -> dict[str, Any]:
    """What decides the figures of a config: a change makes them stale."""
    config = ready.config
    return {
        "gpu": ready.gpu.name,
        "world": ready.world,
        "layout": name_of(config.parallel),
        "recompute": config.model.recompute_granularity,
        "length": config.data.max_prompt_length + config.rollout.max_response_length,
        "tokens": config.training.max_tokens_per_micro_batch,
        "batch": config.training.global_batch_size,
        "lora": config.lora.rank,
    }


def rehearse_config(ready: ReadyConfig, ranks: str = "stages") -> Rehearsed:
    """Rehearse some of its ranks, as ``megatron-gspo rehearse --ranks``: about a minute of a core
    for each. Raises ``RuntimeError`` for a rank that fails.
    """
    parallel = ready.config.parallel
    model = next(EXAMPLES.glob(f"*/models/{ready.model}"))
    job = RankJob(str(ready.file), (f"model.path={model}",), ready.world)
    played = choose_ranks(parallel, ready.world, ranks)
    records, failed = rehearse_ranks(job, played, default_jobs(), lambda rank, result: None)
    if failed:
        raise RuntimeError(f"{ready.name}, rank {failed[0].rank}: {failed[0].message}")
    return rehearsed_of(ready, records)


def rehearsed_of(ready: ReadyConfig, records: Sequence[RankRecord]) -> Rehearsed:
    """The figures of a config from the records of ranks."""
    figures = step_figures(ready.config, ready.world, ready.gpu, records)
    return Rehearsed(setting_of(ready), tuple(record.rank for record in records), figures)


def read_rehearsals() -> dict[str, Rehearsed]:
    """By the name of the config."""
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return {
        name: Rehearsed(stored["setting"], tuple(stored["ranks"]), StepFigures(**stored["figures"]))
        for name, stored in data.items()
    }


def write_rehearsals(rehearsals: dict[str, Rehearsed]) -> None:
    save(RESULTS, {name: asdict(rehearsals[name]) for name in sorted(rehearsals)})
