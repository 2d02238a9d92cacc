"""What Megatron's distributed checkpoint of a model holds, in any layout: asked of Megatron itself, on paper.

The chunks are plain data, so that a conversion streams them without a model; Megatron's own loader takes the result.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from megatron_gspo.mcore.hf_weights import place
from megatron_gspo.mcore.meta_device import meta_model, paper_rank, smallest_world
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.process_groups import Groups, Layout
from megatron_gspo.models import Family, ModelShape
from megatron_gspo.models.parameter_slices import Chunk

_CHECKPOINT_VERSION = 3.0  # Megatron-LM's: query, key and value interleaved by group


@dataclass(frozen=True)
class Frame:
    """chunks: each region of each weight once. objects: key -> bytes of what a layer stores beside its weights."""

    chunks: tuple[Chunk, ...]
    objects: dict[str, bytes]


def checkpoint_frame(family: Family, shape: ModelShape, layout: Layout) -> Frame:
    """What the ranks of a layout write together. A process without ``torch.distributed`` only (`paper_rank`)."""
    chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
    objects: dict[str, bytes] = {}
    world = smallest_world(layout)
    for rank in range(world):  # each holds another part: data-parallel copies need a larger world
        with paper_rank(layout, world, rank) as groups:
            for model in meta_model(shape, layout, ModelSettings(), groups):
                placed = {p.name: p for p in place(model, family, shape, groups)}
                for name, value in model.sharded_state_dict().items():
                    if isinstance(value, ShardedObject):
                        if is_main_replica(value.replica_id):
                            objects[value.unique_key] = _stored(value)
                        continue
                    for found in _chunks(value, placed[name], groups):
                        chunks[found.key, found.offsets] = found
    return Frame(tuple(chunks.values()), objects)


def _chunks(value: ShardedTensor | ShardedTensorFactory, placed: Any, groups: Groups) -> list[Chunk]:
    """The regions that this rank writes of one parameter: a gated `linear_fc1` has two."""
    sharded = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
    part = placed.part(groups)
    return [
        Chunk(
            key=tensor.key,
            whole=tuple(tensor.global_shape),
            offsets=tuple(tensor.global_offset),
            sizes=(1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
            part=part,
            strides=tuple(tensor.data.stride()),
            start=tensor.data.storage_offset(),
        )
        for tensor in sharded
        if is_main_replica(tensor.replica_id)
    ]


def _stored(value: ShardedObject) -> bytes:
    """As Megatron's `torch_dist` strategy stores an object."""
    buffer = io.BytesIO()
    torch.save([value.data], buffer)
    return buffer.getvalue()


def write_frame(folder: Path) -> None:
    """The two files by which Megatron knows a distributed checkpoint, beside the weights of `conversion`."""
    torch.save({"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist"), str(folder))
