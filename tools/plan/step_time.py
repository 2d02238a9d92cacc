"""Estimated seconds of one rollout batch.

FLOPs per token: 2 per weight in the forward pass and twice that in the backward; attention adds 2 h_q L for causal
sequences of L tokens (Narayanan et al., arXiv:2104.04473, appendix, with half of the scores masked). The backward of
the output layer recomputes the logits. Frozen weights have no gradient: their backward is as long as their forward; the
adapters' own products are not counted. Pipeline: m micro-batches take (m + (PP - 1) / VP) times the time of the slowest
stage for one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan import delta_nets
from megatron_gspo.tools.plan.activations import embedding_rows
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.communication import (
    Links,
    context_passes,
    context_seconds,
    data_seconds,
    expert_seconds,
    layer_passes,
    send_seconds,
    tensor_seconds,
)
from megatron_gspo.tools.plan.engine_memory import Generation
from megatron_gspo.tools.plan.hardware import Gpu
from megatron_gspo.tools.plan.host_costs import exposed_seconds
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, Sizes, sizes_of
from megatron_gspo.tools.plan.memory import expert_rows
from megatron_gspo.tools.plan.model_states import States, split_states
from megatron_gspo.tools.plan.parameters import (
    LayerKind,
    active_parameters,
    layer_counts,
    layer_kinds,
    stage_layers,
)
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one rollout batch; parts do not overlap.

    products, attention: matrix products and attention scores, including the passes for old and reference log-probs and
    values, and the value model's updates.
    recompute: activation recomputation. tensor, expert, context, pipeline, data: exposed communication of that
    dimension. bubble: idle time of the pipeline, including the wait for a slower last stage. sync: weights to the
    engine. host: what the host does with the samples and generation does not hide.
    """

    products: float
    attention: float
    recompute: float
    tensor: float
    expert: float
    context: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float
    generation: float
    sync: float
    host: float
    other: float

    @property
    def training(self) -> float:
        return self.total - self.generation - self.sync - self.host - self.other

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def to_json(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"total": self.total}


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward pass of one micro-batch on one stage; ``contexts``: by the layers' mixer."""

    products: float
    attention: float
    head: float
    tensor: float
    expert: float
    contexts: dict[str, float]
    send: float


def mixer_flops(z: Sizes, mixer: str, length: float) -> float:
    """FLOPs of one layer's forward pass between its projections, in sequences of ``length`` tokens."""
    if mixer == "gated_delta_net":
        assert z.delta_net is not None
        return delta_nets.flops(z.delta_net)
    return z.t * 2 * z.query * z.d * length


def forward_pass(inputs: PlanInputs, parallel: ParallelConfig, stage: int, tokens: float, length: float,
                 setting: Setting) -> Pass:
    """Forward pass of a micro-batch of ``tokens`` tokens, in sequences of ``length`` tokens, on a pipeline stage."""
    shape, cluster, assume = inputs.shape, inputs.cluster, inputs.assume
    rows = expert_rows(shape, parallel, int(tokens), assume.expert_imbalance)
    z = sizes_of(shape, parallel, MicroBatch(int(tokens), int(length), rows), setting)
    tp, links = parallel.tensor_model_parallel_size, Links.of(cluster.gpu, assume)
    speed = cluster.gpu.flops * assume.matmul_efficiency * assume.tensor_efficiency ** math.log2(tp)
    kinds = layer_kinds(shape, stage_layers(shape, parallel, stage))
    each = {kind: layer_seconds(z, shape, parallel, speed, cluster, assume, kind) for kind in kinds}
    products = sum(count * each[kind] for kind, count in kinds.items())
    scores = sum(count * mixer_flops(z, kind.mixer, length) for kind, count in kinds.items())
    attention = scores / (cluster.gpu.flops * assume.attention_efficiency)
    last = stage == parallel.pipeline_model_parallel_size - 1
    head = 2 * z.t * z.h * embedding_rows(shape, parallel) / speed if last else 0.0
    return Pass(
        products, attention, head,
        tensor=sum(count * tensor_seconds(z, parallel, links, is_moe=kind.is_moe) for kind, count in kinds.items()),
        expert=sum(count * expert_seconds(z, parallel, links, assume) for kind, count in kinds.items() if kind.is_moe),
        contexts={mixer: sum(count * context_seconds(z, parallel, mixer, links, assume)
                             for kind, count in kinds.items() if kind.mixer == mixer) for mixer in set(shape.mixers)},
        send=send_seconds(z, parallel, links, cluster.gpus),
    )  # fmt: skip


def layer_seconds(z: Sizes, shape: ModelShape, parallel: ParallelConfig, speed: float, cluster: Cluster,
                  assume: Assumptions, kind: LayerKind) -> float:
    """Matrix products of one layer in the forward pass, without attention scores; element-wise operations are a
    constant share of them."""
    weights = sum(size * tensors for size, tensors in layer_counts(shape, parallel, kind)[0].items())
    dense = 2 * z.t * weights / speed
    if not kind.is_moe:
        return dense * (1 + assume.elementwise_share)
    each = z.rows / z.local
    grouped = cluster.gpu.flops * assume.expert_efficiency * each / (each + assume.expert_half_rows)
    return (dense + 6 * z.rows * z.h * z.moe / grouped) * (1 + assume.elementwise_share)


def micro_batches(tokens: float, budget: int, parallel: ParallelConfig) -> int:
    """Micro-batches of a rank with ``tokens`` tokens and a budget of ``budget`` each; a multiple of PP under the
    interleaved schedule."""
    count = max(math.ceil(tokens / budget), 1)
    step = parallel.pipeline_model_parallel_size if parallel.virtual_pipeline_model_parallel_size else 1
    return -(-count // step) * step


def computed_again(stage: Pass, recompute: str) -> float:
    """Seconds of products and attention that the backward pass recomputes."""
    return {"none": 0.0, "selective": stage.attention, "full": stage.products + stage.attention}[recompute]


def weight_passes(setting: Setting) -> int:
    """Products with a weight in forward and backward: output, gradient of the input, its own if it is trained."""
    return 3 if setting.lora is None else 2


def stage_seconds(stage: Pass, setting: Setting) -> tuple[float, float]:
    """Seconds of a micro-batch on a stage, without the output layer: (forward and backward, forward only)."""
    communication = stage.tensor + stage.expert + sum(stage.contexts.values())
    trained = sum(times * getattr(stage, name) for name, times in layer_passes(setting).items())
    trained += sum(context_passes(setting, mixer) * seconds for mixer, seconds in stage.contexts.items())
    computed = stage.products + stage.attention
    products = weight_passes(setting) * stage.products + 3 * stage.attention
    train = products + computed_again(stage, setting.recompute) + trained + 2 * stage.send
    return train, computed + communication + stage.send


def step_time(inputs: PlanInputs, parallel: ParallelConfig, budget: int, setting: Setting, rollouts: Generation
              ) -> StepTime:
    """Seconds of a rollout batch: generation, log-prob passes (two with a reference policy), updates, weight sync. A
    value model has a pass and updates of its own, without an output layer."""
    shape, work, cluster, assume = inputs.shape, inputs.work, inputs.cluster, inputs.assume
    dp, length = parallel.data_parallel_size(cluster.gpus), work.mean_length(assume.mean_response)
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    per_rank = work.sequences * length / dp * assume.packing_imbalance
    updates = work.sequences // work.global_batch_size
    count = micro_batches(per_rank / updates, budget, parallel)
    tokens = per_rank / updates / count  # of a micro-batch
    # A middle stage has the most layers; the last has the output layer and perhaps one layer less.
    usual, last = (forward_pass(inputs, parallel, stage, tokens, length, setting)
                   for stage in (stages // 2, stages - 1))  # fmt: skip
    train_stage, score_stage = stage_seconds(usual, setting)
    train_last, score_last = stage_seconds(last, setting)
    values = int(work.value_model)
    scored = 1 + work.reference  # passes with an output layer
    scores = scored + values
    forwards = updates * count * scores  # micro-batches of the scoring passes
    trained = updates * count * (1 + values)
    head, heads = last.head / stages, weight_passes(setting) + 1  # in training its logits are computed twice
    train_all = (count + (stages - 1) / chunks) * updates * (
        max(train_stage, train_last + heads * last.head) + values * max(train_stage, train_last)
    )
    score_all = (updates * count + (stages - 1) / chunks) * (
        scored * max(score_stage, score_last + last.head) + values * max(score_stage, score_last)
    )
    busy_head = updates * count * (heads + scored) * head
    busy = trained * train_stage + forwards * score_stage + busy_head
    dense, expert = split_states(shape, parallel, cluster.gpus, 0, setting.dtype_bytes, setting.lora)
    reduced = data_seconds(dense, expert, parallel, cluster.gpus, Links.of(cluster.gpu, assume), assume)
    passes = {name: times * trained + forwards for name, times in layer_passes(setting).items()}
    return StepTime(
        products=(weight_passes(setting) * trained + forwards) * usual.products + busy_head,
        attention=(3 * trained + forwards) * usual.attention,
        recompute=trained * computed_again(usual, setting.recompute),
        tensor=passes["tensor"] * usual.tensor, expert=passes["expert"] * usual.expert,
        context=sum((context_passes(setting, mixer) * trained + forwards) * seconds
                    for mixer, seconds in usual.contexts.items()),
        pipeline=(2 * trained + forwards) * usual.send,
        data=updates * (1 + values) * reduced,
        bubble=max(0.0, train_all + score_all - busy),
        optimizer=updates * (1 + values) * _optimizer_seconds(dense + expert, cluster.gpu),
        generation=rollouts.seconds, sync=rollouts.sync_seconds,
        host=exposed_seconds(inputs, parallel, rollouts.seconds), other=assume.other_seconds,
    )  # fmt: skip


def _optimizer_seconds(states: States, gpu: Gpu) -> float:
    """Adam is limited by memory bandwidth: states are read and written; gradients are read for the norm and for the
    update, and zeroed."""
    return (2 * states.optimizer + 3 * states.gradients + states.trained) / (0.8 * gpu.hbm)


def model_flops(shape: ModelShape, work: Workload, assume: Assumptions) -> float:
    """FLOPs of training on a rollout batch without recomputation and log-prob passes: 6 N per token, 4 N with a frozen
    base, and attention."""
    length = work.mean_length(assume.mean_response)
    weights = active_parameters(shape) - shape.vocab_size * shape.hidden_size * (0 if shape.tied_embeddings else 1)
    kinds = layer_kinds(shape, range(shape.num_layers))
    z = sizes_of(shape, ParallelConfig(), MicroBatch(1, 1), Setting())
    attention = sum(count * mixer_flops(z, kind.mixer, length) for kind, count in kinds.items())
    return work.sequences * length * ((6 if work.lora is None else 4) * weights + 3 * attention)
