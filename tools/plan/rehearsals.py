"""Layouts of a plan, rehearsed: memory and time of the real training step (docs/rehearse.md).

One rank of the first and one of the last pipeline stage is rehearsed; the others are like them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_gspo.config import Config
from megatron_gspo.tools.plan.estimate import Choice, Estimate, Hardware
from megatron_gspo.tools.plan.layout_search import is_size
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.rehearse.rank_processes import RankJob, default_jobs, rehearse_ranks
from megatron_gspo.tools.rehearse.records import RankRecord
from megatron_gspo.tools.rehearse.roles import choose_ranks
from megatron_gspo.tools.rehearse.step_figures import StepFigures, step_figures
from megatron_gspo.tools.rehearse.summary import FailedRank


@dataclass(frozen=True)
class RehearsedLayout:
    """A layout with the figures of its step. failure: why there are none; "" where there are."""

    estimate: Estimate
    figures: StepFigures | None = None
    failure: str = ""

    @property
    def order(self) -> float:
        """Seconds of a step; those that failed are last."""
        return self.figures.seconds if self.figures else math.inf

    def fits(self, room: float) -> bool:
        """Whether the fullest rank stays within ``room`` bytes."""
        return self.figures is not None and self.figures.peak <= room


def layout_overrides(choice: Choice) -> list[str]:
    """The config keys of a choice as ``key=value``."""
    sizes = dataclasses.asdict(choice.parallel)
    keys = {f"parallel.{name}": value for name, value in sizes.items() if is_size(name)}
    keys["model.recompute_granularity"] = choice.recompute
    keys["training.max_tokens_per_micro_batch"] = choice.max_tokens
    return [
        f"{key}={'null' if value is None else str(value).lower()}" for key, value in keys.items()
    ]


def rehearse_layouts(
    file: Path,
    overrides: Sequence[str],
    config: Config,
    hardware: Hardware,
    estimates: Sequence[Estimate],
) -> list[RehearsedLayout]:
    """Rehearse each layout of the config in ``file`` with these overrides; those without a failure
    first, the fastest before others."""
    jobs = [
        (estimate, rank)
        for estimate in estimates
        for rank in _ranks(estimate.choice, hardware.gpus)
    ]
    start = time.monotonic()

    def rehearse(job: tuple[Estimate, int]) -> RankRecord | FailedRank:
        estimate, rank = job
        changed = (*overrides, *layout_overrides(estimate.choice))
        played = choose_ranks(estimate.choice.parallel, hardware.gpus, str(rank))
        records, failed = rehearse_ranks(
            RankJob(str(file), changed, hardware.gpus), played, 1, lambda played, result: None
        )
        name = name_of(estimate.choice.parallel)
        print(
            f"rehearsed rank {rank} of {name}, {time.monotonic() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        return records[0] if records else failed[0]

    with ThreadPoolExecutor(default_jobs()) as pool:
        results = list(pool.map(rehearse, jobs))
    layouts = []
    for estimate in estimates:
        ranks = [result for (of, _), result in zip(jobs, results, strict=True) if of is estimate]
        layouts.append(_figures(estimate, config, hardware, ranks))
    return sorted(layouts, key=lambda layout: layout.order)


def _ranks(choice: Choice, gpus: int) -> list[int]:
    stages = choice.parallel.pipeline_model_parallel_size
    return sorted({0, gpus - gpus // stages})


def _figures(
    estimate: Estimate, config: Config, hardware: Hardware, ranks: Sequence[RankRecord | FailedRank]
) -> RehearsedLayout:
    for rank in ranks:
        if isinstance(rank, FailedRank):
            return RehearsedLayout(estimate, failure=f"rank {rank.rank}: {rank.message}")
    records = [rank for rank in ranks if isinstance(rank, RankRecord)]
    choice = estimate.choice
    planned = replace(
        config,
        parallel=choice.parallel,
        training=replace(config.training, max_tokens_per_micro_batch=choice.max_tokens),
    )
    figures = step_figures(planned, hardware.gpus, hardware.gpu, records, hardware.link_efficiency)
    return RehearsedLayout(estimate, figures)
