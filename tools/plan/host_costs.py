"""What the host of one rank holds, receives, sends and waits for in a step: no figure grows with the world.

Measured: seconds of one core per token, and per expert id of it (`make bench-real-size`, docs/scaling.md). Everything
else is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.routing_replay.routes import expert_id_dtype
from megatron_gspo.tools.plan.model_states import MASTER_BYTES, MOMENT_BYTES, rank_states
from megatron_gspo.tools.plan.parameters import stage_layers
from megatron_gspo.tools.plan.workload import PlanInputs, Workload

_NUMBERS = 56  # bytes of a sample on every rank: `data/sample_batch.py`
_TOKEN = 8  # bytes of its id
_MASK = 1  # byte of a response token, on every stage
_TRAINED = 4 + 4 + 4  # bytes of it on the last one: the engine's and the old log-prob, advantage
_ID_ON_THE_WIRE = 4 * 4 / 3  # base64 of int32
_TOKEN_ON_THE_WIRE = 40  # JSON of id, log-prob and text


@dataclass(frozen=True)
class HostCosts:
    """Of the first rank of a replica, in a step.

    numbers, samples: bytes held of all samples, and of the replica's. checkpoint: bytes of the buffers of a save, which
    is what the rank writes and reads. answers: bytes that a client receives. source: bytes of new weights that the
    largest source sends. receive, prepare: seconds of one core until the samples are checked, and from then to the
    metrics.
    """

    numbers: float = 0.0
    samples: float = 0.0
    checkpoint: float = 0.0
    answers: float = 0.0
    source: float = 0.0
    receive: float = 0.0
    prepare: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def host_costs(inputs: PlanInputs, parallel: ParallelConfig) -> HostCosts:
    """Of the fullest stage. Each replica's first rank is a client of all servers."""
    shape, work, gpus, assume = inputs.shape, inputs.work, inputs.cluster.gpus, inputs.assume
    last = parallel.pipeline_model_parallel_size - 1
    stages = {0, min(1, last), last}  # one of them is the fullest, see `stage_states`
    sequences, tokens = _of_replica(inputs, parallel)
    id_bytes = expert_id_dtype(shape.num_experts).itemsize if shape.is_moe else 0
    ids = _expert_ids(shape, work, range(shape.num_layers))
    responses = sequences * assume.mean_response * work.response_length

    def held(stage: int) -> float:
        routes = id_bytes * _expert_ids(shape, work, stage_layers(shape, parallel, stage))
        of_response = _MASK + (_TRAINED + 4 * work.reference) * (stage == last)
        return tokens * (routes + _TOKEN * (stage in (0, last))) + responses * of_response

    receive, prepare = host_seconds(inputs, parallel)
    return HostCosts(
        numbers=work.sequences * _NUMBERS,
        samples=max(map(held, stages)),
        checkpoint=max(owned_bytes(shape, parallel, gpus, stage, work) for stage in stages),
        answers=tokens * (_TOKEN_ON_THE_WIRE + ids * _ID_ON_THE_WIRE),
        source=max(source_bytes(shape, parallel, gpus, stage, work) for stage in stages),
        receive=receive, prepare=prepare,
    )  # fmt: skip


def host_seconds(inputs: PlanInputs, parallel: ParallelConfig) -> tuple[float, float]:
    """`HostCosts.receive` and `HostCosts.prepare`."""
    assume, tokens = inputs.assume, _of_replica(inputs, parallel)[1]
    ids = _expert_ids(inputs.shape, inputs.work, range(inputs.shape.num_layers))
    receive = assume.receive_us_token / 1e6 + ids * assume.receive_ns_id / 1e9
    return tokens * receive, tokens * (assume.prepare_us_token / 1e6 + ids * assume.prepare_ns_id / 1e9)


def exposed_seconds(inputs: PlanInputs, parallel: ParallelConfig, generation: float) -> float:
    """Of a step: answers are received and checked while others are generated."""
    receive, prepare = host_seconds(inputs, parallel)
    return max(0.0, receive - generation) + prepare


def _of_replica(inputs: PlanInputs, parallel: ParallelConfig) -> tuple[float, float]:
    """Sequences and tokens of a step."""
    sequences = inputs.work.sequences / parallel.data_parallel_size(inputs.cluster.gpus)
    return sequences, sequences * inputs.work.mean_length(inputs.assume.mean_response)


def _expert_ids(shape: ModelShape, work: Workload, layers: Iterable[int]) -> int:
    """Of a token in these layers; 0 without routes."""
    return sum(shape.moe_layers[layer] for layer in layers) * shape.experts_per_token if work.routes else 0


def owned_bytes(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, work: Workload) -> float:
    """Trained weights and optimizer state that a rank alone writes: its range of the optimizer's buffers."""
    optimizer = rank_states(shape, parallel, gpus, stage, work.dtype_bytes, work.lora).optimizer
    state = MOMENT_BYTES + (MASTER_BYTES if work.dtype_bytes < 4 else 0)
    return optimizer * (1 + work.dtype_bytes / state)


def source_bytes(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, work: Workload) -> float:
    """Weights that the first source of a stage sends, merged with their adapters: whole tensors, all but the experts of
    other sources."""
    whole = replace(parallel, tensor_model_parallel_size=1, expert_tensor_parallel_size=1)
    return rank_states(shape, whole, gpus, stage, work.dtype_bytes).weights
