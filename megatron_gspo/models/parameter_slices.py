"""Megatron's parameters and checkpoint chunks as plain data, without a model.

A `ParameterSlice` is one tensor-parallel rank's parameter. A `CheckpointChunk` is a region of a
tensor in a Megatron checkpoint, and the elements of a parameter slice that are stored there.
`mcore/checkpoint/checkpoint_metadata.py` creates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_gspo.models.mapping_rules import Rule, Shard
from megatron_gspo.models.model_shape import ModelError, ModelShape
from megatron_gspo.models.stacked_experts import tensor_of


class TensorSource(Protocol):
    """Tensors by Hugging Face name, whole or a slice along one dimension:
    `hf_checkpoint.CheckpointReader`.
    """

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class ParameterSlice:
    """The parameter of one tensor-parallel rank."""

    rule: Rule
    layer: int
    """Layer of the model; -1 outside of the layers."""

    expert: int
    sizes: tuple[int, ...]
    """Sizes of the rank's parameter, the padding of a vocabulary included."""

    rank: int = 0
    """The tensor-parallel rank, of `ranks`."""

    ranks: int = 1

    @property
    def names(self) -> list[str]:
        """The Hugging Face tensors that are merged into it, in the order of the rule's `merge`."""
        return self.rule.names_in(self.layer, self.expert)

    def stored_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type of its tensors in a checkpoint whose others are of ``dtype``."""
        return torch.float32 if self.rule.keeps_float32 else dtype

    def read(self, source: TensorSource, shape: ModelShape) -> Tensor:
        """Read only the slices that the parameter needs, and merge them.

        A vocabulary is padded with 0.
        """
        value = self.rule.merge([self._slice(source, name, shape) for name in self.names], shape)
        if self.rule.is_vocabulary and value.shape[0] < self.sizes[0]:
            value = torch.nn.functional.pad(value, (0, 0, 0, self.sizes[0] - value.shape[0]))
        return value.contiguous()

    def whole_sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Name -> sizes of the whole Hugging Face tensors that it is made of."""
        sizes = {}
        for name, tensor in self.split(torch.empty(self.sizes, device="meta"), shape).items():
            size = list(tensor.shape)
            if self.rule.shard is not Shard.NONE:
                size[self.rule.shard.value] *= self.ranks
            if self.rule.is_vocabulary:
                size[0] = shape.vocab_size
            sizes[name] = tuple(size)
        return sizes

    def check(self, source: TensorSource, shape: ModelShape) -> None:
        """Raise ``ModelError`` naming a tensor whose sizes in `source` don't match config.json."""
        for name, wanted in self.whole_sizes(shape).items():
            if (stored_shape := source.shape(name)) != wanted:
                raise ModelError(
                    f"{name} is {stored_shape} in the checkpoint; config.json makes it {wanted}"
                )
            whole, expert = tensor_of(name)
            if expert is not None and (count := source.shape(whole)[0]) != shape.num_experts:
                raise ModelError(
                    f"{whole} has {count} experts in the checkpoint; config.json has"
                    f" {shape.num_experts}"
                )

    def _slice(self, source: TensorSource, name: str, shape: ModelShape) -> Tensor:
        dim = self.rule.shard.value
        if self.rule.shard is Shard.NONE or self.ranks == 1:
            return source.read(name)
        slices = []
        first = 0
        for size in self.rule.blocks_of(name, source.shape(name)[dim], shape):
            share = self.sizes[0] if self.rule.is_vocabulary else size // self.ranks
            start = min(self.rank * share, size)
            stop = min(start + share, size)
            slices.append(source.read(name, dim, first + start, first + stop))
            first += size
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def split(self, value: Tensor, shape: ModelShape) -> dict[str, Tensor]:
        """The Hugging Face tensors (this rank's slices of them) in the parameter `value`; views
        where possible.
        """
        tensors = dict(zip(self.names, self.rule.split(value, shape), strict=True))
        if self.rule.is_vocabulary and self.ranks == 1:
            return {name: tensor[: shape.vocab_size] for name, tensor in tensors.items()}
        return tensors


@dataclass(frozen=True)
class CheckpointChunk:
    """A region of the tensor `key` of a checkpoint, and where its elements are in `part`."""

    key: str
    whole: tuple[int, ...]
    """Sizes of the whole tensor."""

    offsets: tuple[int, ...]
    """Where the region begins in the tensor, with the axes that Megatron puts before the
    parameter's own (layers, experts)."""

    sizes: tuple[int, ...]
    """Sizes of the region, with the same axes."""

    part: ParameterSlice
    strides: tuple[int, ...]
    """Strides of the elements in `part`, in elements."""

    start: int
    """Position of the first element in `part`, in elements."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def pieces(self, most: int) -> Iterator[CheckpointChunk]:
        """The chunk in regions of at most `most` elements, cut between rows; itself where it is
        no larger.
        """
        axis = len(self.sizes) - len(self.strides)
        rows = self.sizes[axis]
        row = self.numel // self.sizes[axis]
        step = max(most // row, 1)
        if step >= rows:
            yield self
            return
        for first in range(0, rows, step):
            offsets = list(self.offsets)
            sizes = list(self.sizes)
            offsets[axis] += first
            sizes[axis] = min(step, rows - first)
            start = self.start + first * self.strides[0]
            yield replace(self, offsets=tuple(offsets), sizes=tuple(sizes), start=start)

    def view_in(self, value: Tensor) -> Tensor:
        """The chunk's elements as a view of the part's (contiguous) `value`, with the chunk's
        sizes.
        """
        sizes = self.sizes[len(self.sizes) - len(self.strides) :]  # without Megatron's axes
        start = value.storage_offset() + self.start
        return value.as_strided(sizes, self.strides, start).view(self.sizes)
