"""Causal attention over packed sequences in plain torch, with context parallelism, on CPU and GPU.

Megatron-Core's own torch attention refuses packed sequences and context parallelism; Transformer Engine's needs CUDA.
This module takes its place in the layer spec. Sequences are laid end to end (``thd``); the keys and values of a
sequence are gathered over the context-parallel group, its queries stay where they are (Megatron's zigzag split).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_gspo.parallel.context import all_gather_tokens, zigzag_indices

# Sequences share a padded batch while the longest is at most this much longer than the shortest: bounds the padding
# of the attention core without giving every sequence a kernel of its own.
_BUCKET_RATIO = 1.25


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length as one padded batch of ``n`` rows.

    ``query`` [n, Lq] and ``key`` [n, Lk] index local and gathered tokens (padding repeats the last token of its row);
    ``output`` lists, for the local tokens of ``tokens``, their place in the flattened [n * Lq] result. ``mask``
    [n, 1, Lq, Lk] is None where plain causal attention says the same.
    """

    query: Tensor
    key: Tensor
    output: Tensor
    tokens: Tensor
    mask: Tensor | None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the index plan of this module, computed once a micro-batch.

    The plan is data of the micro-batch and shared by all its layers; it is built on the host, without a device
    synchronisation. ``lengths`` are the padded lengths of the whole (not context-parallel) sequences.
    """

    buckets: tuple[_Bucket, ...] = ()
    order: Tensor | None = None  # [t] place of every local token in the concatenation of the buckets


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int, cp_group: Any, device: torch.device) -> PackedSequences:
    """The parameters of one micro-batch. ``cu_seqlens`` [n + 1] int32 on the host, before context parallelism."""
    on_device = cu_seqlens.to(device)
    buckets = _plan(cu_seqlens, cp_group.rank(), cp_group.size())
    order = torch.argsort(torch.cat([bucket.tokens for bucket in buckets]))
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=on_device, cu_seqlens_kv=on_device,
        max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen,
        buckets=tuple(_to(bucket, device) for bucket in buckets), order=order.to(device),
    )


def _to(bucket: _Bucket, device: torch.device) -> _Bucket:
    mask = None if bucket.mask is None else bucket.mask.to(device)
    query, key, output, tokens = (x.to(device) for x in (bucket.query, bucket.key, bucket.output, bucket.tokens))
    return _Bucket(query, key, output, tokens, mask)


def _plan(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> list[_Bucket]:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    owned = [zigzag_indices(cu_seqlens, rank, cp_size) for rank in range(cp_size)]
    # where the token at packed position p lies after the all-gather: ranks one behind the other
    gathered = torch.empty(bounds[-1], dtype=torch.long)
    gathered[torch.cat(owned)] = torch.arange(bounds[-1])
    buckets: list[_Bucket] = []
    while by_length:
        limit = lengths[by_length[0]] * _BUCKET_RATIO
        count = next((k for k, i in enumerate(by_length) if lengths[i] > limit), len(by_length))
        rows, by_length = by_length[:count], by_length[count:]
        buckets.append(_bucket(rows, bounds, gathered, owned[cp_rank], cp_size))
    return buckets


def _bucket(rows: list[int], bounds: list[int], gathered: Tensor, mine: Tensor, cp_size: int) -> _Bucket:
    starts = torch.tensor([bounds[i] for i in rows])
    lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in rows])
    longest = int(lengths.max())
    key = gathered[starts[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)]
    local_starts, local_lengths = starts // cp_size, lengths // cp_size
    columns = torch.arange(longest // cp_size)
    query = local_starts[:, None] + torch.minimum(columns, local_lengths[:, None] - 1)
    real = columns < local_lengths[:, None]
    output = real.flatten().nonzero().squeeze(1)
    mask = None
    if cp_size > 1:
        position = mine[query] - starts[:, None]
        mask = (torch.arange(longest) <= position[:, :, None])[:, None]
    return _Bucket(query, key, output, query[real], mask)


class PackedAttention(torch.nn.Module):
    """Core attention of a Megatron layer. Its signature is the one Megatron's ``SelfAttention`` builds and calls."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, *args: Any,
                 softmax_scale: float | None = None, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout}: PackedAttention has none; set it to 0")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: PackedSequences | None = None, **kwargs: Any) -> Tensor:
        """``query`` [t, heads, d], ``key`` and ``value`` [t, groups, d], local tokens; returns [t, heads * d]."""
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError("PackedAttention needs packed_seq_params of mcore.attention.packed_sequences()")
        heads, dim = query.shape[1], query.shape[2]
        pair = torch.stack((key, value), dim=1)
        if self.cp_group.size() > 1:
            pair = all_gather_tokens(pair, self.cp_group)
        parts = []
        for bucket in packed_seq_params.buckets:
            rows, length = bucket.query.shape
            q = query.index_select(0, bucket.query.flatten()).view(rows, length, heads, dim).transpose(1, 2)
            kv = pair.index_select(0, bucket.key.flatten()).view(rows, -1, *pair.shape[1:])
            k, v = kv.unbind(dim=2)
            out = F.scaled_dot_product_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bucket.mask, is_causal=bucket.mask is None,
                scale=self.softmax_scale, enable_gqa=k.shape[2] != heads,
            )
            parts.append(out.transpose(1, 2).reshape(rows * length, heads * dim).index_select(0, bucket.output))
        return torch.cat(parts).index_select(0, packed_seq_params.order)
