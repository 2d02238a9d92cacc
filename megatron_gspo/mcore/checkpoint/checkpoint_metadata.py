"""The contents of Megatron's distributed checkpoint of a model in a parallel layout, from a model
on the meta device.

The chunks are plain data, so that a conversion streams them without a model. Megatron's own loader
reads the result.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_gspo.config import LoRAConfig, ModelConfig, ParallelConfig
from megatron_gspo.mcore.hf_weights import MappedParameter, map_parameters
from megatron_gspo.mcore.lora.adapter_weights import adapter_parameters
from megatron_gspo.mcore.lora.attach import attach_adapters
from megatron_gspo.mcore.meta_device import meta_model, simulated_rank, smallest_world
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import Family, ModelShape
from megatron_gspo.models.parameter_slices import CheckpointChunk

_CHECKPOINT_VERSION = 3.0  # Megatron-LM's: query, key and value interleaved by group


@dataclass(frozen=True)
class CheckpointMetadata:
    """chunks: each region of each weight once.

    objects: key -> bytes of a layer's other stored objects.
    """

    chunks: tuple[CheckpointChunk, ...]
    objects: dict[str, bytes]


def checkpoint_metadata(
    family: Family, shape: ModelShape, parallel: ParallelConfig
) -> CheckpointMetadata:
    """What the ranks of a layout write together.

    Only in a process without ``torch.distributed`` (`simulated_rank`).
    """
    chunks: dict[tuple[str, tuple[int, ...]], CheckpointChunk] = {}
    objects: dict[str, bytes] = {}
    model_config = ModelConfig(path="", dtype="float32")  # stored chunks have no type
    world = smallest_world(parallel)
    for rank in range(world):  # the smallest world has no data-parallel copies
        with simulated_rank(parallel, world, rank) as groups:
            for model in meta_model(shape, parallel, model_config, groups):
                parameters = {p.name: p for p in map_parameters(model, family, shape, groups)}
                for name, value in model.sharded_state_dict().items():
                    if isinstance(value, ShardedObject):
                        if is_main_replica(value.replica_id):
                            objects[value.unique_key] = _stored(value)
                        continue
                    for chunk in _chunks(value, parameters[name], groups):
                        chunks[chunk.key, chunk.offsets] = chunk
    return CheckpointMetadata(tuple(chunks.values()), objects)


def adapter_chunks(
    family: Family, shape: ModelShape, lora: LoRAConfig
) -> tuple[CheckpointChunk, ...]:
    """The chunks of a checkpoint of adapters, each matrix whole.

    Only in a process without ``torch.distributed``.
    """
    chunks: list[CheckpointChunk] = []
    with simulated_rank(ParallelConfig(), 1, 0) as groups:
        for model in meta_model(
            shape, ParallelConfig(), ModelConfig(path="", dtype="float32"), groups
        ):
            attach_adapters([model], lora, family, shape, groups)
            parameters = adapter_parameters(model, lora, family, shape, groups)
            for name, value in model.sharded_state_dict().items():
                if name in parameters:
                    chunks += _chunks(value, parameters[name], groups)
    return tuple(chunks)


def _chunks(
    value: ShardedTensor | ShardedTensorFactory, parameter: MappedParameter, groups: ProcessGroups
) -> list[CheckpointChunk]:
    """The regions that this rank writes of one parameter: a gated `linear_fc1` has two."""
    sharded = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
    local_slice = parameter.local_slice(groups)
    return [
        CheckpointChunk(
            key=tensor.key,
            whole=tuple(tensor.global_shape),
            offsets=tuple(tensor.global_offset),
            sizes=(1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
            part=local_slice,
            strides=tuple(tensor.data.stride()),
            start=tensor.data.storage_offset(),
        )
        for tensor in sharded
        if is_main_replica(tensor.replica_id)
    ]


def _stored(value: ShardedObject) -> bytes:
    """The object as Megatron's `torch_dist` strategy stores it."""
    buffer = io.BytesIO()
    torch.save([value.data], buffer)
    return buffer.getvalue()


def write_metadata_files(folder: Path) -> None:
    """Write the two files that mark a distributed checkpoint for Megatron."""
    torch.save(
        {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}, folder / COMMON_STATE_FNAME
    )
    save_config(CheckpointingConfig("torch_dist"), str(folder))
