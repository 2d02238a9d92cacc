"""A key/value cache for decoding. It is written in place: a step copies one column, not the whole
cache. Layers of linear attention keep their state instead, those of sparse attention the keys of
their indexer too, and layers of an MLP or experts alone nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, LinearAttentionLayer


class _BufferLayer(DynamicLayer):
    """Keys and values of one layer, [B, heads, capacity, dim], each with its own dim (latent
    attention keeps a latent and a rotated part); the first `length` columns are in use."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns and return all that are in use. args, kwargs: Transformers', which are not
        read."""
        end = self.length + key_states.shape[2]
        if not self.is_initialized:
            self.dtype = key_states.dtype
            self.device = key_states.device
            self._allocate(key_states, value_states, max(end, self.capacity))
            self.is_initialized = True
        elif end > self.capacity:
            old_keys, old_values = self._views()
            self._allocate(key_states, value_states, max(end, 2 * self.capacity))
            self._key_buffer[:, :, : self.length] = old_keys
            self._value_buffer[:, :, : self.length] = old_values
        self._key_buffer[:, :, self.length : end] = key_states
        self._value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self._views()
        return self.keys, self.values

    def select_rows(self, rows: Tensor, capacity: int) -> None:
        """Batch row i becomes the old row rows[i]; allocates `capacity` columns."""
        keys, values = self._views()
        self._allocate(keys, values, max(capacity, self.length), batch=rows.shape[0])
        torch.index_select(keys, 0, rows, out=self._key_buffer[:, :, : self.length])
        torch.index_select(values, 0, rows, out=self._value_buffer[:, :, : self.length])
        self.keys, self.values = self._views()

    def get_seq_length(self) -> int:
        return self.length

    def _allocate(
        self, keys: Tensor, values: Tensor, capacity: int, batch: int | None = None
    ) -> None:
        """Buffers with the heads, dims and types of `keys` and `values`."""
        self.capacity = capacity
        batch = batch or keys.shape[0]
        self._key_buffer = keys.new_empty(batch, keys.shape[1], capacity, keys.shape[3])
        self._value_buffer = values.new_empty(batch, values.shape[1], capacity, values.shape[3])

    def _views(self) -> tuple[Tensor, Tensor]:
        return self._key_buffer[:, :, : self.length], self._value_buffer[:, :, : self.length]


class _IndexedLayer(_BufferLayer):
    """A layer of sparse attention, which also keeps the keys of its indexer, [B, columns, dim]."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # As keys without values, which have heads.
        self._indexer = _BufferLayer(capacity)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append columns [B, L, dim] and return all that are in use."""
        keys = indexer_key_states[:, None]
        return self._indexer.update(keys, keys[..., :0])[0][:, 0]

    def select_rows(self, rows: Tensor, capacity: int) -> None:
        super().select_rows(rows, capacity)
        self._indexer.select_rows(rows, capacity)


class _StateLayer(LinearAttentionLayer):
    """The state of a gated delta net or of Mamba-2 and the last tokens of its convolution, of the same
    size after any length.
    """

    def select_rows(self, rows: Tensor, capacity: int) -> None:
        """Batch row i becomes the old row rows[i]."""
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                states[number] = None if state is None else state.index_select(0, rows)


class _EmptyLayer(DummyLayer):
    """An MLP or experts alone."""

    def select_rows(self, rows: Tensor, capacity: int) -> None:
        """There are none."""


_LAYERS: dict[str, Any] = {
    "full_attention": _BufferLayer,
    "sliding_attention": _BufferLayer,  # keeps all columns
    "indexed_attention": _IndexedLayer,
    "linear_attention": lambda capacity: _StateLayer(),
    "moe": lambda capacity: _EmptyLayer(),
    "mlp": lambda capacity: _EmptyLayer(),
}


def kinds_of(config: PretrainedConfig) -> list[str]:
    """The kind of each layer."""
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def is_served(config: PretrainedConfig) -> bool:
    """Whether `BufferCache` has all kinds of layers of a model."""
    kinds = set(kinds_of(config))
    return kinds <= _LAYERS.keys() and not kinds <= {"linear_attention", "moe", "mlp"}


class BufferCache(Cache):
    """Transformers' cache interface over one layer of the given kind (`layer_types` of a config)
    each.

    One of them must be another kind of attention than linear: it counts the tokens.
    """

    def __init__(self, kinds: Sequence[str], capacity: int) -> None:
        super().__init__(layers=[_LAYERS[kind](capacity) for kind in kinds])

    def select_rows(self, rows: Tensor, capacity: int = 0) -> None:
        """Reorder, repeat or drop batch rows: row i becomes the old row rows[i] ([B'] int64).

        capacity: columns to allocate; doubled when they are used up.
        """
        for layer in self.layers:
            layer.select_rows(rows, capacity)  # type: ignore[union-attr] # all are of _LAYERS
