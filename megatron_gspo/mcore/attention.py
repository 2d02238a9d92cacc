"""Causal attention over packed sequences in plain torch, with context parallelism, on CPU and GPU.

Megatron-Core's own torch attention supports neither packed sequences nor context parallelism; Transformer Engine's
needs CUDA. This module replaces it in the layer spec. Sequences are concatenated (``thd`` format). The keys and values
of a sequence are gathered over the context-parallel group; its queries stay on their rank (Megatron's zigzag split).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_gspo.mcore.operators import pad_rows, rotate, unpad_rows
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.parallel.context_parallel import all_gather_tokens, zigzag_indices

# Longest over shortest sequence of a padded batch, at most: bounds padding without one kernel per sequence.
_BUCKET_RATIO = 1.25


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length as one padded batch: ``rows`` sequences, ``length`` tokens each.

    ``mask`` [rows, 1, queries, length] is None where plain causal attention is the same.
    """

    rows: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class _Slots:
    """The slots of tokens in the padded batches, bucket after bucket, each [rows, length]; for one head.

    ``source`` [slots]: the token in each slot; padding repeats the last token of its row. For each token [tokens]:
    ``row``, the first slot of its row; ``column``, its position in the row; ``length``, the row's length.
    """

    source: tuple[Tensor, ...]  # [rows, length] of each bucket
    row: Tensor
    column: Tensor
    length: Tensor

    def of_heads(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(source [slots * heads], slot [tokens * heads]) for tokens laid out [token, head] and slots
        [bucket][row, head, column]: the arguments of ``pad_rows``."""
        head = torch.arange(heads)
        sources = [(slots[:, None] * heads + head[:, None]).flatten() for slots in self.source]
        slot = (self.row * heads + self.column)[:, None] + self.length[:, None] * head
        return torch.cat(sources).to(device), slot.flatten().to(device)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the index plan of this module, computed once per micro-batch.

    The plan is data of the micro-batch and shared by all its layers; it is built on the host, without a device
    synchronisation. ``positions`` [t] are those of the local tokens in their sequences. ``routes``: of the
    micro-batch; the routers read them here.
    """

    buckets: tuple[_Bucket, ...] = ()
    queries: _Slots | None = None  # local tokens
    keys: _Slots | None = None  # gathered tokens
    positions: Tensor | None = None
    routes: MicroBatchRoutes | None = None
    cached: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def slots(self, which: str, heads: int) -> tuple[Tensor, Tensor]:
        """``_Slots.of_heads`` of ``queries`` or ``keys``, computed once per micro-batch."""
        if (which, heads) not in self.cached:
            self.cached[which, heads] = getattr(self, which).of_heads(heads, self.cu_seqlens_q.device)
        return self.cached[which, heads]

    def rotation(self, base: float, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every local token, [t, 1, dim]: what ``rotate`` takes."""
        key = base, dim, dtype
        if key not in self.cached:
            frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            angles = (self.positions[:, None].float() * frequencies)[:, None].to(self.cu_seqlens_q.device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            self.cached[key] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self.cached[key]


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int, cp_group: Any, device: torch.device) -> PackedSequences:
    """The parameters of one micro-batch. ``cu_seqlens`` [n + 1] int32 on the host, before context parallelism."""
    cp_rank, cp_size = cp_group.rank(), cp_group.size()
    on_device = cu_seqlens.to(device)
    bounds = cu_seqlens.long()
    starts, lengths = bounds[:-1], bounds.diff()
    batches = _batches(lengths.tolist())
    owned = [zigzag_indices(cu_seqlens, rank, cp_size) for rank in range(cp_size)]
    mine = owned[cp_rank]
    # index of the token at packed position p after the all-gather, which concatenates the ranks
    gathered = torch.empty(int(bounds[-1]), dtype=torch.long)
    gathered[torch.cat(owned)] = torch.arange(int(bounds[-1]))
    queries = _slots(batches, starts // cp_size, lengths // cp_size, None)
    positions = mine - starts.repeat_interleave(lengths // cp_size)
    buckets = []
    for rows, slots in zip(batches, queries.source, strict=True):
        longest = int(lengths[rows].max())
        visible = torch.arange(longest) <= positions[slots][:, :, None]
        buckets.append(_Bucket(len(rows), longest, visible[:, None].to(device) if cp_size > 1 else None))
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=on_device, cu_seqlens_kv=on_device,
        max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen, buckets=tuple(buckets), queries=queries,
        keys=queries if cp_size == 1 else _slots(batches, starts, lengths, gathered), positions=positions,
    )


def _batches(lengths: list[int]) -> list[list[int]]:
    """Sequences of similar length together, by length."""
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches = []
    while by_length:
        limit = lengths[by_length[0]] * _BUCKET_RATIO
        count = next((k for k, i in enumerate(by_length) if lengths[i] > limit), len(by_length))
        batches.append(by_length[:count])
        by_length = by_length[count:]
    return batches


def _slots(batches: list[list[int]], starts: Tensor, lengths: Tensor, moved: Tensor | None) -> _Slots:
    """The slots of sequences that begin at ``starts``; their token i is token ``moved[i]`` (None: i) of the input."""
    sources, first = [], 0
    row, column, length = torch.empty(3, int(lengths.sum()), dtype=torch.long)
    for rows in batches:
        own = lengths[rows][:, None]
        columns = torch.arange(int(own.max()))
        real = columns < own
        tokens = starts[rows][:, None] + torch.minimum(columns, own - 1)
        tokens = tokens if moved is None else moved[tokens]
        begins = first + len(columns) * torch.arange(len(rows))
        row[tokens[real]] = begins[:, None].expand_as(tokens)[real]
        column[tokens[real]] = columns.expand_as(tokens)[real]
        length[tokens[real]] = len(columns)
        first += tokens.numel()
        sources.append(tokens)
    return _Slots(tuple(sources), row, column, length)


class PackedAttention(torch.nn.Module):
    """Core attention of a Megatron layer, with the signature that Megatron's ``SelfAttention`` builds and calls.

    With ``rotary_base`` it also applies the rotary embedding, which the model would apply sequence by sequence.
    """

    rotary_base: float | None = None

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, pg_collection: Any = None,
                 **kwargs: Any) -> None:  # fmt: skip
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout}: must be 0; PackedAttention has no dropout")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: PackedSequences | None = None, **kwargs: Any) -> Tensor:
        """``query`` [t, heads, d], ``key`` and ``value`` [t, groups, d], local tokens; returns [t, heads * d]."""
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError("PackedAttention needs packed_seq_params of mcore.attention.packed_sequences()")
        plan, (tokens, heads, dim), groups = packed_seq_params, query.shape, key.shape[1]
        if self.rotary_base is not None:
            cos, sin = plan.rotation(self.rotary_base, dim, query.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.cp_group.size() > 1:
            key, value = all_gather_tokens(torch.stack((key, value), dim=1), self.cp_group).unbind(dim=1)
        query_source, query_slot = plan.slots("queries", heads)
        key_slots = plan.slots("keys", groups)
        query = pad_rows(query.reshape(-1, dim), query_source, query_slot)
        key, value = pad_rows(key.reshape(-1, dim), *key_slots), pad_rows(value.reshape(-1, dim), *key_slots)
        out = unpad_rows(self._attend(plan.buckets, query, key, value, heads), query_slot)
        return out.view(tokens, heads * dim)

    def _attend(self, buckets: tuple[_Bucket, ...], query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        """Attention within each row of each padded batch; all tensors are [slots * heads, d]."""
        dim, cp_size = query.shape[1], self.cp_group.size()
        groups = heads * key.shape[0] // (query.shape[0] * cp_size)
        query_sizes = [bucket.rows * heads * bucket.length // cp_size for bucket in buckets]
        key_sizes = [bucket.rows * groups * bucket.length for bucket in buckets]
        parts = []
        for bucket, q, k, v in zip(buckets, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes),
                                   strict=True):
            q = q.view(bucket.rows, heads, -1, dim)
            k, v = k.view(bucket.rows, groups, -1, dim), v.view(bucket.rows, groups, -1, dim)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=self.softmax_scale,
                enable_gqa=groups != heads,
            )
            parts.append(out.reshape(-1, dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
