"""Memory and time of a whole optimizer step, from the rehearsed ranks: a rehearsal runs the fewest
micro-batches, and a step repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_gspo.config import Config
from megatron_gspo.gpus import Gpu
from megatron_gspo.tools.rehearse.mini_batch import plan_mini_batch
from megatron_gspo.tools.rehearse.op_times import (
    LINK_EFFICIENCY,
    STEP_PHASES,
    collective_seconds,
    rates_of,
)
from megatron_gspo.tools.rehearse.records import OpTotal, RankRecord

# Exchange once a mini-batch, whatever the number of micro-batches.
_DATA_GROUPS = ("dp", "dp_cp", "expert_dp")
# Where operations are called once a mini-batch.
_ONCE = ("megatron/core/distributed/", "megatron/core/optimizer/")


@dataclass(frozen=True)
class StepFigures:
    """The figures of the fullest and of the slowest rehearsed rank.

    states: bytes of weights, gradients, optimizer, and a reference policy; activations: their peak
    in forward and backward; peak: of all live tensors. compute, communication, bubble: seconds of
    an optimizer step with the log-probs before it.
    """

    states: Mapping[str, int]
    activations: int
    peak: int
    compute: float
    communication: float
    bubble: float

    @property
    def state_bytes(self) -> int:
        return sum(self.states.values())

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble


def step_figures(
    config: Config,
    world: int,
    gpu: Gpu,
    records: Sequence[RankRecord],
    link_efficiency: float = LINK_EFFICIENCY,
) -> StepFigures:
    """The figures of ``config`` on ``world`` GPUs, from the records of some of its ranks."""
    parallel = config.parallel
    mini_batch = plan_mini_batch(config, world)
    repeated = mini_batch.of_all / mini_batch.micro_batches
    fullest = max(records, key=lambda record: record.memory.peak.total)
    compute = max(compute_seconds(record, repeated, gpu) for record in records)
    communication = max(
        communication_seconds(record, repeated, gpu, link_efficiency) for record in records
    )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    waits = (parallel.pipeline_model_parallel_size - 1) / (chunks * mini_batch.of_all)
    return StepFigures(
        states=fullest.memory.states,
        activations=fullest.memory.peak_activations.bytes.get("activations", 0),
        peak=fullest.memory.peak.total,
        compute=compute,
        communication=communication,
        bubble=(compute + communication) * waits,
    )


def compute_seconds(record: RankRecord, repeated: float, gpu: Gpu) -> float:
    """Seconds of a rank's step on the GPU. repeated: real micro-batches for each rehearsed one."""
    rates = rates_of(gpu)
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


def communication_seconds(
    record: RankRecord, repeated: float, gpu: Gpu, link_efficiency: float
) -> float:
    """Seconds of communication of a rank's step, nothing hidden behind products."""
    seconds = 0.0
    for call in record.collectives:
        if call.phase in STEP_PHASES:
            once = call.phase == "optimizer" or call.group in _DATA_GROUPS
            taken = collective_seconds(call, record.rank, gpu, link_efficiency)
            seconds += taken * (1 if once else repeated)
    return seconds
