"""Estimated peak memory of a GPU in training."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.models.families import with_value_head
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.routing_replay.routes import expert_id_dtype
from megatron_gspo.tools.plan.activations import head_bytes, peak_bytes
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, sizes_of
from megatron_gspo.tools.plan.model_states import States, rank_states
from megatron_gspo.tools.plan.parameters import total_parameters
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank of a pipeline stage.

    activations: peak of forward and backward, including head. head: the log-prob head's part of it. engine: memory
    that a colocated or embedded engine keeps during training. runtime: CUDA context, NCCL and similar. value_model:
    weights, gradients and optimizer state of PPO's; its passes peak below the policy's.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    head: float
    routes: float
    engine: float
    runtime: float
    value_model: float = 0.0

    @property
    def held(self) -> float:
        """Bytes that a colocated engine must leave to the trainer: ``rollout.offload_trainer`` moves everything to host
        memory but the weights, which an update and a log-prob check need beside the engine's."""
        return self.weights + self.runtime

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer + self.reference + self.value_model
        return states + self.activations + self.routes + self.engine + self.runtime

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def expert_rows(shape: ModelShape, parallel: ParallelConfig, tokens: int, imbalance: float) -> float | None:
    """Token rows that the busiest rank's experts of a layer process; None for a dense model."""
    if not shape.is_moe:
        return None
    z = sizes_of(shape, parallel, MicroBatch(tokens, tokens), Setting())
    return z.rows * (imbalance if z.sent else 1.0)


def stage_memory(inputs: PlanInputs, parallel: ParallelConfig, stage: int, states: States, tokens: int,
                 micro_batches: int, setting: Setting) -> Memory:
    """Memory of a pipeline stage that trains on ``micro_batches`` micro-batches of ``tokens`` tokens."""
    shape, work, cluster, assume = inputs.shape, inputs.work, inputs.cluster, inputs.assume
    batch = MicroBatch(tokens, work.longest, expert_rows(shape, parallel, tokens, assume.expert_imbalance))
    peak = peak_bytes(shape, parallel, stage, batch, micro_batches, setting)
    z = sizes_of(shape, parallel, batch, setting)
    head = head_bytes(z, shape, parallel, setting) if stage == parallel.pipeline_model_parallel_size - 1 else None
    whole = total_parameters(shape) * setting.dtype_bytes
    value_model = 0.0
    if work.value_model:
        value_model = rank_states(with_value_head(shape), parallel, cluster.gpus, stage, setting.dtype_bytes).total
    engine = {"colocated": assume.engine_residual_gib * GIB, "embedded": whole}.get(cluster.engine, 0.0)
    return Memory(
        stage=stage, weights=states.weights, gradients=states.gradients, optimizer=states.optimizer,
        reference=states.weights if work.reference and work.lora is None else 0.0,
        activations=peak["total"] * (1 + assume.fragmentation),
        head=0.0 if head is None else head.saved + head.working,
        routes=route_bytes(shape, parallel, work, cluster, assume) if work.routes else 0.0,
        engine=engine, runtime=assume.runtime_gib * GIB, value_model=value_model,
    )  # fmt: skip


def stage_states(shape: ModelShape, parallel: ParallelConfig, gpus: int, dtype_bytes: int,
                 lora: LoRAConfig | None = None) -> dict[int, States]:  # fmt: skip
    """States of the stages that can be the fullest, by stage. lora: see `rank_states`.

    The first has the most micro-batches in flight. The second has more layers if the embedding counts as a layer. The
    last has the output layer.
    """
    last = parallel.pipeline_model_parallel_size - 1
    stages = sorted({0, last} | ({min(1, last)} if parallel.extra_pipeline_layers else set()))
    return {stage: rank_states(shape, parallel, gpus, stage, dtype_bytes, lora) for stage in stages}


def worst_memory(inputs: PlanInputs, parallel: ParallelConfig, states: dict[int, States], tokens: int,
                 micro_batches: int, setting: Setting) -> Memory:
    """The fullest of the stages in ``states``."""
    found = [stage_memory(inputs, parallel, stage, held, tokens, micro_batches, setting)
             for stage, held in states.items()]  # fmt: skip
    return max(found, key=lambda memory: memory.total)


def route_bytes(shape: ModelShape, parallel: ParallelConfig, work: Workload, cluster: Cluster,
                assume: Assumptions) -> float:
    """Bytes of the expert ids of a rank's mini-batch with ``routing.storage: device``.

    Those of its stage's layers are kept, as received, and this rank's rows of them (``mcore/routing_replay``); a byte
    each up to 256 experts, otherwise 2.
    """
    if not shape.is_moe:
        return 0.0
    size = expert_id_dtype(shape.num_experts).itemsize
    sequences = work.global_batch_size / parallel.data_parallel_size(cluster.gpus)
    per_token = sum(shape.moe_layers) * shape.experts_per_token * size / parallel.pipeline_model_parallel_size
    split = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    return sequences * work.mean_length(assume.mean_response) * per_token * (1 + 1 / split)
