"""Bytes of weights, gradients and optimizer state on a rank, in Megatron's memory layout.

Sources (megatron-core 0.16 to 0.19): ``distributed/param_and_grad_buffer.py`` for buffers and padding,
``optimizer/distrib_optimizer.py`` for the range of each data-parallel rank, ``optimizer/optimizer.py`` for float32
master weights. ``mcore/policy.py`` sets ``grad_reduce_in_fp32`` and torch's AdamW, which has a 4-byte step count per
parameter tensor. Frozen weights are outside of the buffers. With ``overlap_grad_reduce`` the first chunk of the first
stage has several buckets, each padded to a multiple of 128 and of the ranks; `exact_states` counts this padding,
`rank_states` does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.adapters import adapter_counts, chunk_adapters
from megatron_gspo.tools.plan.parameters import (
    LayerKind,
    Parameter,
    chunk_layers,
    chunk_parameters,
    layer_counts,
    layer_kinds,
    outer_parameters,
)

GRADIENT_BYTES = 4  # accumulated and reduced in float32
MOMENT_BYTES = 8  # Adam's two moments, float32
MASTER_BYTES = 4  # float32 copies of bfloat16 weights
STEP_BYTES = 4  # torch's Adam stores the step of each parameter as a tensor


@dataclass(frozen=True)
class States:
    """Bytes that a rank holds between steps. frozen: of the weights, those that are not trained."""

    weights: int
    gradients: int
    optimizer: int
    frozen: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(self.weights + other.weights, self.gradients + other.gradients,
                      self.optimizer + other.optimizer, self.frozen + other.frozen)  # fmt: skip

    @property
    def trained(self) -> int:
        """Bytes of the weights that are trained, with the padding of their buffers."""
        return self.weights - self.frozen


def data_ranks(parallel: ParallelConfig, gpus: int) -> tuple[int, int]:
    """Ranks that hold the same dense and the same expert parameters: (DP x CP, expert data parallel)."""
    stage = gpus // parallel.pipeline_model_parallel_size
    expert = parallel.expert_model_parallel_size * parallel.expert_tensor_size
    return stage // parallel.tensor_model_parallel_size, stage // expert


def own_expert_buffer(parallel: ParallelConfig) -> bool:
    """Whether experts have separate buffers: with EP, or if ETP differs from TP (``patches/expert_gradients``)."""
    return (
        parallel.expert_model_parallel_size > 1
        or parallel.expert_tensor_size != parallel.tensor_model_parallel_size
    )


def rank_states(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, dtype_bytes: int,
                lora: LoRAConfig | None = None) -> States:  # fmt: skip
    """States of a rank of a pipeline stage, with the optimizer state of the largest data-parallel shard. lora: of the
    adapters, if they are what is trained.

    Computed from sums per kind of layer. An optimizer shard is an equal part of its buffer with padding and step
    counts, which exceeds the exact size by less than 256 elements per tensor and chunk.
    """
    dense, expert = split_states(shape, parallel, gpus, stage, dtype_bytes, lora)
    return dense + expert


def split_states(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, dtype_bytes: int,
                 lora: LoRAConfig | None = None) -> tuple[States, States]:  # fmt: skip
    """`rank_states` of all chunks of a stage: (dense parameters, experts)."""
    dense = expert = States(0, 0, 0)
    for chunk in range(parallel.virtual_pipeline_model_parallel_size or 1):
        added = chunk_states(shape, parallel, gpus, stage, chunk, dtype_bytes, lora)
        dense, expert = dense + added[0], expert + added[1]
    return dense, expert


def chunk_states(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, chunk: int,
                 dtype_bytes: int, lora: LoRAConfig | None = None) -> tuple[States, States]:  # fmt: skip
    """States of one model chunk: (dense parameters, experts)."""
    kinds = layer_kinds(shape, chunk_layers(shape, parallel, stage, chunk))
    before, after = outer_parameters(shape, parallel, stage, chunk)
    counts = (Counter(part.count for part in (*before, *after)), Counter[int]())
    _add_layers(counts, {kind: layer_counts(shape, parallel, kind) for kind in kinds}, kinds)
    trained, frozen = counts, [States(0, 0, 0)] * 2
    if lora is not None:
        trained = (Counter[int](), Counter[int]())
        _add_layers(trained, {kind: adapter_counts(shape, parallel, lora, kind) for kind in kinds}, kinds)
        frozen = [_frozen(sum(count * copies for count, copies in of.items()), dtype_bytes) for of in counts]
    found = [
        _summed(total.items(), parallel.use_distributed_optimizer, ranks, dtype_bytes) + base
        for total, ranks, base in zip(trained, data_ranks(parallel, gpus), frozen, strict=True)
    ]
    return found[0], found[1]


def _add_layers(counts: tuple[Counter[int], Counter[int]],
                of_layer: Mapping[LayerKind, tuple[Counter[int], Counter[int]]],
                kinds: Counter[LayerKind]) -> None:  # fmt: skip
    """Add the tensors of layers: ``of_layer`` of one of a kind, ``kinds`` how many there are."""
    for kind, layers in kinds.items():
        for total, each in zip(counts, of_layer[kind], strict=True):
            for count, copies in each.items():
                total[count] += copies * layers


def _frozen(elements: int, dtype_bytes: int) -> States:
    return States(dtype_bytes * elements, 0, 0, dtype_bytes * elements)


def _summed(counts: Collection[tuple[int, int]], distributed: bool, ranks: int, dtype_bytes: int) -> States:
    tensors = sum(copies for _, copies in counts)
    per_element = MOMENT_BYTES + (MASTER_BYTES if dtype_bytes < 4 else 0)
    if not distributed:
        elements = sum(count * copies for count, copies in counts)
        return States(dtype_bytes * elements, GRADIENT_BYTES * elements, per_element * elements + STEP_BYTES * tensors)
    elements = _round_up(sum(_round_up(count, 64) * copies for count, copies in counts), math.lcm(ranks, 128))
    own = elements // ranks
    steps = STEP_BYTES * (tensors // ranks + 1) if elements else 0
    return States(dtype_bytes * elements, GRADIENT_BYTES * elements, per_element * own + steps)


def exact_states(shape: ModelShape, parallel: ParallelConfig, gpus: int, stage: int, dtype_bytes: int,
                 places: tuple[int, int], lora: LoRAConfig | None = None) -> States:  # fmt: skip
    """Exact states of one rank, for comparison with measured bytes; visits every parameter.

    places: its index among the ranks with the same dense, and with the same expert, weights. lora: see `rank_states`.
    """
    total = States(0, 0, 0)
    apart = own_expert_buffer(parallel)
    for chunk in range(parallel.virtual_pipeline_model_parallel_size or 1):
        bucket = _bucket_size(parallel, gpus) if stage == 0 and chunk == 0 else None
        parts = list(chunk_parameters(shape, parallel, stage, chunk))
        if lora is not None:
            total += _frozen(sum(part.count for part in parts), dtype_bytes)
            parts = list(chunk_adapters(shape, parallel, lora, stage, chunk))
        dense = [part for part in parts if not (part.expert and apart)]
        expert = [part for part in parts if part.expert and apart]
        for group, size, place in zip((dense, expert), data_ranks(parallel, gpus), places, strict=True):
            total += buffer_states(group, parallel.use_distributed_optimizer, size, place, dtype_bytes, bucket)
    return total


def _bucket_size(parallel: ParallelConfig, gpus: int) -> int | None:
    """Elements at which ``DistributedDataParallel`` ends a bucket, None for one bucket."""
    return max(40_000_000, 1_000_000 * parallel.data_parallel_size(gpus)) if parallel.overlap_grad_reduce else None


def buffer_states(parts: Sequence[Parameter], distributed: bool, ranks: int, place: int, dtype_bytes: int,
                  bucket_size: int | None = None) -> States:
    """One buffer of Megatron's DistributedDataParallel, with Adam's state of rank ``place`` of its ``ranks`` ranks. A
    bucket ends with the tensor that brings it to ``bucket_size`` elements, if that is given."""
    if not distributed:
        return _summed([(part.count, 1) for part in parts], False, ranks, dtype_bytes)
    buckets, size = _buckets(parts, math.lcm(ranks, 128), bucket_size)
    per_element = MOMENT_BYTES + (MASTER_BYTES if dtype_bytes < 4 else 0)
    optimizer = 0
    for start, end, spans in buckets:
        share = (end - start) // ranks
        low, high = start + place * share, start + (place + 1) * share
        own = [min(b, high) - max(a, low) for a, b in spans if min(b, high) > max(a, low)]
        optimizer += per_element * sum(own) + STEP_BYTES * len(own)
    return States(dtype_bytes * size, GRADIENT_BYTES * size, optimizer)


Bucket = tuple[int, int, list[tuple[int, int]]]  # first element, end, (start, end) of each tensor


def _buckets(parts: Iterable[Parameter], multiple: int, bucket_size: int | None) -> tuple[list[Bucket], int]:
    """Buckets of ``_ParamAndGradBuffer`` with the distributed optimizer, and their total size.

    Tensors are placed from the last to the first, each at a multiple of 64 elements. A bucket ends at a multiple of
    ``multiple``. A shared embedding has its own bucket. Others end where they have ``bucket_size`` elements.
    """
    buckets: list[Bucket] = []
    start = position = 0
    spans: list[tuple[int, int]] = []
    for part in list(parts)[::-1]:
        position = _round_up(position, 64)
        if part.shared and spans:
            end = _round_up(position, multiple)
            buckets.append((start, end, spans))
            start, position, spans = end, end, []
        spans.append((position, position + part.count))
        position += part.count
        if part.shared or (bucket_size is not None and position - start >= bucket_size):
            end = _round_up(position, multiple)
            buckets.append((start, end, spans))
            start, position, spans = end, end, []
    if spans:
        position = _round_up(position, multiple)
        buckets.append((start, position, spans))
    return buckets, position


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
