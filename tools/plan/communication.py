"""Bytes of a rank's collectives, and the seconds that it spends in those that nothing hides, from bandwidths.

Bytes are the larger of what a rank puts into a collective and gets out, as rehearsals record them.
Ring collectives move (n - 1) / n of the gathered bytes past each rank (Thakur et al. 2005). Ranks are laid out as
Megatron lays them, TP innermost, then CP, DP, PP, and experts ETP, EP within a stage: a group that fits into a node's
GPUs uses NVLink, any other the network.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.delta_nets import exchanged_bytes
from megatron_gspo.tools.plan.hardware import Gpu
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, Sizes, sizes_of
from megatron_gspo.tools.plan.model_states import States, data_ranks, own_expert_buffer, split_states
from megatron_gspo.tools.plan.parameters import layer_kinds, stage_layers


@dataclass(frozen=True)
class Links:
    """Bytes a second that a rank gets: within a node, and between nodes."""

    near: float
    far: float
    node: int

    @classmethod
    def of(cls, gpu: Gpu, assume: Assumptions) -> Links:
        return cls(gpu.nvlink * assume.nvlink_efficiency, gpu.network * assume.network_efficiency, gpu.node)

    def rate(self, span: int) -> float:
        """Of a group whose ranks lie within ``span`` consecutive ranks."""
        return self.near if span <= self.node else self.far


def tensor_parts(z: Sizes, *, is_moe: bool) -> tuple[float, float]:
    """One layer's forward, gathered sizes: what it gathers before its mixer and what it scatters behind it, and the
    same around a dense MLP or a shared expert; the other experts take the tokens as they lie. Of latent attention the
    latents are gathered, and the hidden states where queries have none."""
    both = (2 if is_moe and not z.shared else 4) * z.a * z.t * z.h
    gathered = z.h
    if z.latents is not None:
        gathered = z.latents.gathered + (0 if z.latents.query else z.h)
    return both / 2 + z.a * z.t * (gathered - z.h), both / 2


def tensor_bytes(z: Sizes, *, is_moe: bool) -> float:
    """The sum of `tensor_parts`."""
    return sum(tensor_parts(z, is_moe=is_moe))


def tensor_seconds(z: Sizes, parallel: ParallelConfig, links: Links, *, is_moe: bool) -> float:
    """Of `tensor_bytes`."""
    tp = parallel.tensor_model_parallel_size
    return tensor_bytes(z, is_moe=is_moe) * (tp - 1) / tp / links.rate(tp)


def expert_bytes(z: Sizes) -> float:
    """One layer's forward: tokens that a rank sends to their experts, and what it gets back."""
    return 2 * z.a * z.s * z.k * z.h


def expert_tensor_bytes(z: Sizes) -> float:
    """One layer's forward with ETP: rows gathered, and outputs scattered, which Megatron widens to float32."""
    return (z.a + 4) * z.rows * z.h


def expert_seconds(z: Sizes, parallel: ParallelConfig, links: Links, assume: Assumptions) -> float:
    """One layer's forward: tokens to their experts and back, over NVLink within the node and the network beyond it;
    with ETP `expert_tensor_bytes` too."""
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    sent = expert_bytes(z) * assume.expert_imbalance
    far = max(0.0, 1 - links.node / (ep * etp))
    near = max(0.0, (ep - 1) / ep - far)
    seconds = sent * (near / links.near + far / links.far) / assume.all_to_all_efficiency
    return seconds + expert_tensor_bytes(z) * (etp - 1) / etp / links.rate(etp)


def context_bytes(z: Sizes, parallel: ParallelConfig, mixer: str) -> float:
    """One layer's forward: keys and values of all ranks; a gated delta net's heads for tokens and back."""
    if mixer == "gated_delta_net":
        assert z.delta_net is not None
        return exchanged_bytes(z.delta_net, z.a)
    return parallel.context_parallel_size * z.a * z.t * 2 * z.groups * z.d


def context_seconds(z: Sizes, parallel: ParallelConfig, mixer: str, links: Links, assume: Assumptions) -> float:
    """One layer's forward: the other ranks' keys and values, the part that attention doesn't hide; of a gated delta
    net all."""
    cp = parallel.context_parallel_size
    received = context_bytes(z, parallel, mixer) * (cp - 1) / cp
    exposed = 1.0 if mixer == "gated_delta_net" else assume.context_exposed
    return exposed * received / links.rate(cp * parallel.tensor_model_parallel_size)


def layer_passes(setting: Setting) -> dict[str, float]:
    """Communication of a layer's forward and backward, by dimension, over that of its forward; `context_passes` apart.
    That of TP is the mean of `tensor_passes`."""
    full = setting.recompute == "full"
    return {"tensor": sum(tensor_passes(setting)) / 2, "expert": 2.0 + full}


def tensor_passes(setting: Setting) -> tuple[float, float]:
    """The same of each of `tensor_parts`. Gradients of weights, which frozen ones don't have, gather inputs again."""
    full = setting.recompute == "full"
    return 2.0 + (setting.lora is None) + full, 2.0 + full


def context_passes(setting: Setting, mixer: str) -> float:
    """The same of context parallelism. Transformer Engine passes keys and values on again, where the torch layers have
    kept them; a gated delta net's exchanges are repeated with whole layers only."""
    if mixer == "gated_delta_net":
        return 2.0 + (setting.recompute == "full")
    return (2.0 if setting.implementation == "torch" else 3.0) + (setting.recompute != "none")


def pipeline_bytes(z: Sizes, parallel: ParallelConfig, stage: int) -> float:
    """One micro-batch: hidden states that a stage sends and receives, and their gradients, for each of its chunks."""
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    parts = range(stage, stages * chunks, stages)
    neighbours = sum((part > 0) + (part < stages * chunks - 1) for part in parts)
    return 2 * neighbours * z.a * z.s * z.h


def outer_bytes(z: Sizes, parallel: ParallelConfig, stage: int, *, is_frozen: bool = False) -> float:
    """One micro-batch over TP outside of layers, forward and backward: of the embedding, which has no backward if it
    is frozen, and of the rows that the log-prob head scores, whose gradient is float32."""
    embedding = (1 if is_frozen else 2) * z.a * z.t if stage == 0 else 0.0
    head = (2 * z.a + 4) * z.scored if stage == parallel.pipeline_model_parallel_size - 1 else 0.0
    return (embedding + head) * z.h


def mini_batch_bytes(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, batch: MicroBatch,
                     micro_batches: int, setting: Setting) -> dict[str, int]:
    """Of a rank's collectives in the forward and backward passes and the optimizer step of a mini-batch, by purpose;
    hidden states, gradients and weights without the few bytes of counts, probabilities, statistics, the rotated part of
    keys that latent attention's heads share, and the adapters' products (of a token their rank where a hidden state has
    the hidden size)."""
    z, passes = sizes_of(shape, parallel, batch, setting), layer_passes(setting)
    kinds = layer_kinds(shape, stage_layers(shape, parallel, stage))
    layers = sum(count * sum(map(operator.mul, tensor_passes(setting), tensor_parts(z, is_moe=kind.is_moe)))
                 for kind, count in kinds.items())  # fmt: skip
    context = sum(count * context_passes(setting, kind.mixer) * context_bytes(z, parallel, kind.mixer)
                  for kind, count in kinds.items())  # fmt: skip
    experts = sum(count for kind, count in kinds.items() if kind.is_moe)
    parts = {
        "tensor": (parallel.tensor_model_parallel_size, layers
                   + outer_bytes(z, parallel, stage, is_frozen=setting.lora is not None)),
        "context": (parallel.context_parallel_size, context),
        "expert": (parallel.expert_model_parallel_size, passes["expert"] * experts * expert_bytes(z)),
        "expert tensor": (parallel.expert_tensor_size, passes["expert"] * experts * expert_tensor_bytes(z)),
        "pipeline": (parallel.pipeline_model_parallel_size, pipeline_bytes(z, parallel, stage)),
    }  # fmt: skip
    found = {name: round(micro_batches * size) for name, (ranks, size) in parts.items() if ranks > 1}
    both = split_states(shape, parallel, gpus, stage, setting.dtype_bytes, setting.lora)
    gathers = weight_gathers(parallel, has_experts=both[1].trained > 0)
    for kind, states, ranks in zip(("", "expert "), both, data_ranks(parallel, gpus), strict=True):
        if ranks > 1:
            found[f"{kind}gradients"], found[f"{kind}weights"] = data_bytes(states, parallel, gathers)
    return found


def send_seconds(z: Sizes, parallel: ParallelConfig, links: Links, gpus: int) -> float:
    """One micro-batch's hidden states to the next stage."""
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return 0.0
    span = 2 * gpus // stages
    return (parallel.virtual_pipeline_model_parallel_size or 1) * z.a * z.s * z.h / links.rate(span)


def data_bytes(states: States, parallel: ParallelConfig, gathers: int) -> tuple[int, int]:
    """Once an optimizer step, whole buffers: (gradients reduced in float32, their weights gathered ``gathers`` times).
    Without the distributed optimizer no weights are gathered."""
    return states.gradients, gathers * states.trained if parallel.use_distributed_optimizer else 0


def weight_gathers(parallel: ParallelConfig, *, has_experts: bool) -> int:
    """How often an optimizer step gathers a weight. Megatron has an optimizer for the dense and one for the expert
    buffers, and each gathers both, unless ``overlap_param_gather`` leaves that to the next forward pass."""
    return 2 if has_experts and own_expert_buffer(parallel) and not parallel.overlap_param_gather else 1


def data_seconds(dense: States, expert: States, parallel: ParallelConfig, gpus: int, links: Links,
                 assume: Assumptions) -> float:
    """Of `data_bytes`, for dense and expert parameters over their own ranks. Without the distributed optimizer
    gradients are summed, which moves them twice."""
    seconds = 0.0
    stage = gpus // parallel.pipeline_model_parallel_size
    gathers = weight_gathers(parallel, has_experts=expert.trained > 0)
    for states, ranks in zip((dense, expert), data_ranks(parallel, gpus), strict=True):
        reduced, gathered = data_bytes(states, parallel, gathers)
        moved = reduced + (gathered if parallel.use_distributed_optimizer else reduced)
        if ranks > 1:
            seconds += moved * (ranks - 1) / ranks / links.rate(stage)
    return seconds * (1 - assume.gradient_overlap)
