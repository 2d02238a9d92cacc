"""Layouts of a plan, rehearsed: memory and time of the real training step (docs/rehearse.md).

One rank of the first and one of the last pipeline stage is rehearsed; the others are like them.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_gspo.config import Config
from megatron_gspo.tools.plan.estimate import Choice, Estimate, Hardware
from megatron_gspo.tools.plan.layout_search import is_size
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.rehearse.mini_batch import plan_mini_batch
from megatron_gspo.tools.rehearse.op_times import STEP_PHASES, collective_seconds, rates_of
from megatron_gspo.tools.rehearse.rank_processes import RankJob, default_jobs, rehearse_ranks
from megatron_gspo.tools.rehearse.records import OpTotal, RankRecord
from megatron_gspo.tools.rehearse.roles import choose_ranks
from megatron_gspo.tools.rehearse.summary import FailedRank

# Exchange once a mini-batch, whatever the number of micro-batches.
_DATA_GROUPS = ("dp", "dp_cp", "expert_dp")
# Where operations are called once a mini-batch.
_ONCE = ("megatron/core/distributed/", "megatron/core/optimizer/")


@dataclass(frozen=True)
class RehearsedLayout:
    """A layout with the figures of its fullest and of its slowest rehearsed rank.

    states: bytes of weights, gradients and optimizer; activations: their peak in forward and
    backward; peak: of all live tensors. compute, communication, bubble: seconds of an optimizer
    step with the log-probs before it. failure: why there are no figures; "" where there are.
    """

    estimate: Estimate
    states: Mapping[str, int] = dataclasses.field(default_factory=dict)
    activations: int = 0
    peak: int = 0
    compute: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    failure: str = ""

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble

    def fits(self, room: float) -> bool:
        return not self.failure and self.peak <= room


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
        return (*records, *failed)[0]

    with ThreadPoolExecutor(default_jobs()) as pool:
        results = list(pool.map(rehearse, jobs))
    layouts = []
    for estimate in estimates:
        ranks = [result for (of, _), result in zip(jobs, results, strict=True) if of is estimate]
        layouts.append(_figures(estimate, config, hardware, ranks))
    return sorted(layouts, key=lambda layout: (bool(layout.failure), layout.seconds))


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
    training = config.training
    planned = replace(
        config,
        parallel=choice.parallel,
        training=replace(training, max_tokens_per_micro_batch=choice.max_tokens),
    )
    mini_batch = plan_mini_batch(planned, hardware.gpus)
    repeated = mini_batch.of_all / mini_batch.micro_batches
    fullest = max(records, key=lambda record: record.memory.peak.total)
    compute = max(compute_seconds(record, repeated, hardware) for record in records)
    communication = max(communication_seconds(record, repeated, hardware) for record in records)
    parallel = choice.parallel
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    waits = (parallel.pipeline_model_parallel_size - 1) / (chunks * mini_batch.of_all)
    return RehearsedLayout(
        estimate,
        states=fullest.memory.states,
        activations=fullest.memory.peak_activations.bytes.get("activations", 0),
        peak=fullest.memory.peak.total,
        compute=compute,
        communication=communication,
        bubble=(compute + communication) * waits,
    )


def compute_seconds(record: RankRecord, repeated: float, hardware: Hardware) -> float:
    """Of a rank's step on the GPU. repeated: real micro-batches for each rehearsed one."""
    rates = rates_of(hardware.gpu)
    return sum(
        rates.seconds(op) * (1 if _is_once(op) else repeated)
        for op in record.ops
        if op.phase in STEP_PHASES
    )


def _is_once(op: OpTotal) -> bool:
    """Whether an operation runs once a mini-batch, whatever the number of micro-batches: in the
    optimizer and in Megatron's gradient buffers, but for the hooks of their parameters.
    """
    return op.phase == "optimizer" or (
        op.where.startswith(_ONCE) and not op.where.endswith(" hook")
    )


def communication_seconds(record: RankRecord, repeated: float, hardware: Hardware) -> float:
    """Of a rank's step, nothing hidden behind products."""
    seconds = 0.0
    for call in record.collectives:
        if call.phase in STEP_PHASES:
            once = call.phase == "optimizer" or call.group in _DATA_GROUPS
            taken = collective_seconds(call, record.rank, hardware.gpu, hardware.link_efficiency)
            seconds += taken * (1 if once else repeated)
    return seconds
