"""How one Megatron parameter is made of Hugging Face tensors, for both directions.

A tensor-parallel rank's shard is made of slices of each Hugging Face tensor along one dimension
(``Shard``); ``merge`` puts these slices together, ``split`` takes them apart. So a rank reads only
what it needs, and the way back concatenates the ranks' slices along the same dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.stacked_experts import tensor_of


class Shard(Enum):
    """The dimension of the Hugging Face tensors that tensor parallelism cuts; None: every rank
    holds all of it.
    """

    NONE = None
    ROWS = 0
    COLUMNS = 1


def _single(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    return parts[0]


def _as_list(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    return [tensor]


def _always(shape: ModelShape) -> bool:
    return True


def merge_rows(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Gate and up projection one above the other, as Megatron's gated ``linear_fc1``."""
    return torch.cat(list(parts), dim=0)


def split_two(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_rows`` for two equal parts."""
    return list(tensor.chunk(2, dim=0))


def merge_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Query, key and value rows interleaved per query group: ``[q ... q k v]`` for each group
    of this shard.
    """
    query, key, value = parts
    groups = key.shape[0] // shape.head_dim
    blocks = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(blocks, dim=1).reshape(-1, *query.shape[1:])


def split_qkv(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_qkv``."""
    heads = shape.num_attention_heads // shape.num_query_groups
    grouped = tensor.reshape(-1, (heads + 2) * shape.head_dim, *tensor.shape[1:])
    sizes = [heads * shape.head_dim, shape.head_dim, shape.head_dim]
    return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split(sizes, dim=1)]


def merge_transposed(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """A matrix whose rows are its inputs."""
    return parts[0].t()


def split_transposed(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_transposed``."""
    return [tensor.t()]


def merge_alternating(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Gate and up projection whose outputs alternate in the last dimension, as Megatron's gated
    ``linear_fc1``.
    """
    return torch.cat([parts[0][..., i::2].t() for i in range(2)], dim=0)


def split_alternating(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of ``merge_alternating``."""
    gate, up = tensor.chunk(2, dim=0)
    return [torch.stack((gate.t(), up.t()), dim=-1).flatten(-2)]


@dataclass(frozen=True)
class Rule:
    """One row of a family's table: a parameter, and the Hugging Face tensors that it is made of."""

    megatron: tuple[str, ...]
    """The names that the parameter has in the Transformer Engine and torch layer specs."""

    hugging_face: tuple[str, ...]
    """The tensors that it is made of, in the order of ``merge``. ``{layer}`` and ``{expert}`` stand
    for global numbers; ``name[{expert}]`` is a slice of a tensor of all experts
    (``stacked_experts.py``).
    """

    shard: Shard = Shard.NONE
    """What tensor parallelism cuts."""

    merge: Callable[[Sequence[Tensor], ModelShape], Tensor] = _single
    """The parameter from slices of the tensors."""

    split: Callable[[Tensor, ModelShape], list[Tensor]] = _as_list
    """The inverse of ``merge``."""

    applies: Callable[[ModelShape], bool] = _always
    """Whether a model of the family has the parameter."""

    keeps_float32: bool = False
    """Whether it is stored and sent in float32 whatever the type of the others."""

    blocks: Callable[[ModelShape], tuple[int, ...]] | None = None
    """Sizes of row blocks of the first tensor, each of which tensor parallelism cuts; None: it cuts
    the tensor as a whole."""

    prefix: str = "model.layers.{layer}."
    """What the names of a layer begin with."""

    takes_adapter: bool = True
    """False for a linear layer that can't have an adapter."""

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.hugging_face[0]

    @property
    def is_vocabulary(self) -> bool:
        """Whether the rows are the vocabulary, which Megatron pads to a multiple."""
        names = ("embedding.word_embeddings.weight", "output_layer.weight")
        return self.megatron[0] in names and self.shard is Shard.ROWS

    def blocks_of(self, name: str, size: int, shape: ModelShape) -> tuple[int, ...]:
        """The sizes of the parts of a tensor [size, ...] that tensor parallelism cuts one by one;
        ``name``: any of the rule's, with or without a prefix."""
        first = self.hugging_face[0].removesuffix("[{expert}]")
        if self.blocks is None or not tensor_of(name)[0].endswith(first):
            return (size,)
        return self.blocks(shape)

    def names(self, layer: int = 0, expert: int = 0) -> list[str]:
        """The Hugging Face names for one layer and expert."""
        return [name.format(layer=layer, expert=expert) for name in self.hugging_face]

    def names_in(self, layer: int, expert: int) -> list[str]:
        """The whole Hugging Face names; layer -1 is outside of the layers."""
        prefix = self.prefix.format(layer=layer) if layer >= 0 else ""
        return [prefix + name for name in self.names(layer, expert)]
