"""Seconds that the rollout engines take for a batch, and for new weights; the roofline of decoding.

A decoding step reads the weights that its tokens use and the keys and values of all of them, or, with many tokens, is
bound by products; whichever is longer, and never less than the engine's own overhead (Pope et al., "Efficiently Scaling
Transformer Inference", arXiv:2211.05102, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_gspo.errors import InputError, show_bytes
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters
from megatron_gspo.tools.plan.workload import OWN_GPUS, Cluster, Workload


@dataclass(frozen=True)
class Generation:
    """``concurrency``: sequences that one engine decodes at once; ``tail``: the part of ``seconds`` in which only the
    longest responses are left; ``shortfall``: bytes that an engine lacks for its weights and one longest sequence."""

    seconds: float
    tail: float
    concurrency: float
    sync_seconds: float
    shortfall: float = 0.0


def kv_bytes(shape: ModelShape, engine_tensor: int, dtype_bytes: int) -> float:
    """Keys and values of one token over all layers of attention and all GPUs of an engine, which repeats heads it can't
    split, and the latents from which all heads are made. A gated delta net has none; its state is not counted."""
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.key_value_rank + shape.rotary.dim) * dtype_bytes * engine_tensor
    copies = max(1.0, engine_tensor / shape.num_query_groups)
    layers = sum(mixer != "gated_delta_net" for mixer in shape.mixers)
    return 2 * layers * shape.num_query_groups * shape.head_dim * dtype_bytes * copies


def weights_read(shape: ModelShape, tokens: float, dtype_bytes: int) -> float:
    """Bytes of weights that a step with so many tokens reads: an expert is read if any token is routed to it."""
    total, active = total_parameters(shape), active_parameters(shape)
    if not shape.is_moe:
        return total * dtype_bytes
    share = shape.experts_per_token / shape.num_experts
    experts = (total - active) / (1 - share) if share < 1 else 0.0
    return (total - experts + experts * (1 - (1 - share) ** tokens)) * dtype_bytes


def step_seconds(shape: ModelShape, tokens: float, context: float, cluster: Cluster, assume: Assumptions,
                 dtype_bytes: int) -> float:
    """One decoding step of ``tokens`` sequences with so many tokens of context each."""
    gpus, gpu = cluster.engine_tensor, cluster.gpu
    read = weights_read(shape, tokens, dtype_bytes) + tokens * context * kv_bytes(shape, gpus, dtype_bytes)
    products = 2 * active_parameters(shape) * tokens / (gpus * gpu.flops * assume.engine_flops)
    return max(assume.decode_step_ms / 1e3, read / (gpus * gpu.hbm * assume.engine_bandwidth), products)


def generation(shape: ModelShape, work: Workload, cluster: Cluster, assume: Assumptions, held: float) -> Generation:
    """A rollout batch on all engines. ``held``: bytes of the trainer on each GPU, where the engine shares it."""
    if cluster.engine in ("none", "embedded") or not cluster.serving:
        return Generation(0.0, 0.0, 0.0, 0.0)
    gpus, gpu = cluster.engine_tensor, cluster.gpu
    engines = cluster.serving // gpus
    weights = total_parameters(shape) * work.dtype_bytes
    room = gpu.memory - held - assume.engine_residual_gib * GIB if cluster.engine == "colocated" else (
        gpu.memory * assume.engine_memory)  # fmt: skip
    cache = gpus * room - weights
    per_token = kv_bytes(shape, gpus, work.dtype_bytes)
    mean = assume.mean_response * work.response_length
    one = per_token * work.longest
    sync = sync_seconds(weights, engines, cluster, assume)
    if cache < one:
        return Generation(float("inf"), 0.0, 0.0, sync, one - cache)
    share = work.sequences / engines
    together = max(1.0, min(share, assume.engine_sequences, cache / (per_token * (work.prompt_length + mean))))
    prefill = 2 * active_parameters(shape) * work.prompt_length * work.rollout_batch_size / (
        cluster.serving * gpu.flops * assume.engine_flops)  # fmt: skip
    bulk = share / together * mean * step_seconds(
        shape, together, work.prompt_length + mean / 2, cluster, assume, work.dtype_bytes)  # fmt: skip
    tail = (work.response_length - mean) * step_seconds(
        shape, max(1.0, together / 8), work.longest, cluster, assume, work.dtype_bytes)  # fmt: skip
    return Generation(prefill + bulk + tail, tail, together, sync)


def check_engine(shape: ModelShape, work: Workload, cluster: Cluster, assume: Assumptions) -> None:
    """Raise ``InputError`` if an engine on GPUs of its own has no room for the weights and one longest sequence."""
    if cluster.engine not in OWN_GPUS:
        return  # on the training GPUs it depends on the layout
    if lacking := generation(shape, work, cluster, assume, 0.0).shortfall:
        divisors = (size for size in range(1, cluster.serving + 1) if cluster.serving % size == 0)
        others = (replace(cluster, engine_tensor=size) for size in divisors)
        fitting = (each.engine_tensor for each in others if not generation(shape, work, each, assume, 0.0).shortfall)
        least = next(fitting, None)
        raise InputError(
            f"--engine-tensor {cluster.engine_tensor}: an engine of {cluster.engine_tensor} x {cluster.gpu.name} lacks "
            f"{show_bytes(lacking)} for the weights and one longest sequence; "
            + (f"give at least {least}" if least else "raise --engine-gpus with it, or take larger GPUs")
        )


def sync_seconds(weights: float, engines: int, cluster: Cluster, assume: Assumptions) -> float:
    """New weights to every engine by the faster route, broadcast or files on a shared disk (docs/sglang.md).

    A broadcast sends each tensor once, from the rank that holds it, for any number of engines (NCCL's ring). Every
    GPU of an engine receives all tensors, from sources at the same time or one after the other, so its link is the
    limit. Files are written once, by all sources, and read by every engine.
    """
    send = weights / (cluster.gpu.network * assume.network_efficiency)
    disk = (engines + 1) * weights / (assume.file_system_gbs * 1e9)
    return min(send, disk)
