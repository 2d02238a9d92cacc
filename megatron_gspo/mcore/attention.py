"""Causal attention over packed sequences in plain torch, with context parallelism, on CPU and GPU.

Megatron-Core's own torch attention supports neither packed sequences nor context parallelism;
Transformer Engine's needs CUDA. This module replaces it in the layer spec. Sequences are
concatenated (``thd`` format). The keys and values of a sequence are gathered over the
context-parallel group; its queries stay on their rank (Megatron's zigzag split).

A rank's work is a list of segments: consecutive queries with the keys up to the last of them.
Torch's variable-length kernel takes the segments as they are. Where it does not exist (CPU, float32
and float64, older torch) segments of similar length are padded to a batch for
``scaled_dot_product_attention``.

A layer may have a window, the number of keys that a query attends up to its own, and sinks
(``mcore/sinks.py``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_gspo.mcore.chunk_layout import ChunkLayout, chunk_layout
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.operators import Permutation, pad_rows, rotate, unpad_rows
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.sinks import (
    VarlenKernel,
    sink_attention,
    with_sink_dimension,
    with_sink_key,
)
from megatron_gspo.mcore.token_copies import copy_tokens
from megatron_gspo.mcore.token_runs import TokenRun, token_runs
from megatron_gspo.models.rotary import Rotary
from megatron_gspo.parallel.context_parallel import (
    all_gather_tokens,
    chunk_lengths,
    concatenated_ranges,
    zigzag_indices,
)

# Longest over shortest segment of a padded batch, at most: bounds padding without one kernel per
# segment.
_BUCKET_RATIO = 1.25
# Elements of one attention mask, at most (rows * queries * keys).
_MASK_ELEMENTS = 2**23
# Queries of a block under a window, at least: one of a few queries would be slow.
_BLOCK_QUERIES = 64
# Flash attention's largest head, and what its head sizes are multiples of.
_FLASH_HEAD_SIZE = 256
_FLASH_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class AttentionSegments:
    """The queries of a rank in their order, cut into runs, each with the keys that it attends; on
    the host.

    The queries of a segment are at the positions of its last keys, and attend the keys up to their
    own position. ``query_lengths``, ``key_lengths``: int32 [m]. ``key_source``: int32 [sum of
    key_lengths], each key as a row of the all-gathered keys; None where the segments' keys are the
    local ones in their order.
    """

    query_lengths: Tensor
    key_lengths: Tensor
    key_source: Tensor | None


def segments_of(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> AttentionSegments:
    """The segments of a rank: its sequences, or under context parallelism its two chunks of each
    sequence.

    ``cu_seqlens`` [n + 1] int32 on the host, bounds before context parallelism. Two chunks of a
    sequence share keys, which are listed for both: ``1 / (2 * cp_size)`` more keys than tokens.
    Raises ValueError for a length that 2 * cp_size does not divide.
    """
    lengths = cu_seqlens.diff()
    if cp_size == 1:
        return AttentionSegments(lengths, lengths, None)
    chunk = torch.arange(2 * cp_size, dtype=torch.int32)
    owner = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
    width = chunk_lengths(lengths, cp_size)
    local_start = cu_seqlens[:-1] // cp_size
    # first row of each chunk, [n, 2 * cp_size], in the all-gathered keys: the ranks one after the
    # other
    first_row = (
        owner * (cu_seqlens[-1] // cp_size)
        + local_start[:, None]
        + (chunk >= cp_size) * width[:, None]
    )
    local_chunks = torch.tensor([cp_rank, 2 * cp_size - 1 - cp_rank], dtype=torch.int32)
    attended = torch.cat([chunk[: last + 1] for last in local_chunks.tolist()])
    key_source = concatenated_ranges(
        first_row[:, attended].flatten(), width.repeat_interleave(len(attended))
    )
    key_lengths = (width[:, None] * (local_chunks + 1)).flatten()
    return AttentionSegments(width.repeat_interleave(2), key_lengths, key_source)


@dataclass(frozen=True)
class _Varlen:
    """Arguments of the variable-length kernel: bounds of the segments, int32 [m + 1], and their
    largest lengths.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class _Bucket:
    """Segments of similar length as one padded batch of ``rows`` rows.

    ``before`` [rows]: how many keys of a row come before its first query; None where these are
    none. ``least``: the smallest of these.
    """

    rows: int
    queries: int
    keys: int
    before: Tensor | None
    least: int


@dataclass(frozen=True)
class _Padded:
    """The padded batches, and the arguments of ``pad_rows`` that lay out queries and keys,
    bucket after bucket.
    """

    buckets: tuple[_Bucket, ...]
    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the index plans of this module, shared by the
    layers.

    A plan is computed by the first layer that needs it, so not for Transformer Engine's layers. It
    is built on the host in time and memory linear in tokens, and copied to the device without
    waiting for it. ``cu_seqlens``: int32 [n + 1] on the host. ``routes``: of the micro-batch; the
    routers read them here.
    """

    cu_seqlens: Tensor | None = None
    cp_rank: int = 0
    cp_size: int = 1
    routes: MicroBatchRoutes | None = None
    rotations: dict[tuple[Rotary, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)
    layouts: dict[int, ChunkLayout] = field(default_factory=dict)

    @cached_property
    def segments(self) -> AttentionSegments:
        """The segments of this rank."""
        return segments_of(self.cu_seqlens, self.cp_rank, self.cp_size)

    @cached_property
    def key_copies(self) -> Permutation:
        """The segments' keys as copies of the all-gathered ones; only under context parallelism."""
        source = self.segments.key_source
        count = source.bincount(minlength=int(self.cu_seqlens[-1]))
        moved = self._on_device(source=source, count=count)
        return Permutation.of(moved["source"], moved["count"])

    @cached_property
    def runs(self) -> tuple[TokenRun, ...]:
        """The runs of this rank's tokens."""
        return token_runs(self.cu_seqlens, self.cp_rank, self.cp_size)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.cu_seqlens.diff().max())

    @cached_property
    def _packed_order(self) -> Permutation:
        """The all-gathered tokens in their packed order; only under context parallelism."""
        gathered = torch.cat(
            [zigzag_indices(self.cu_seqlens, rank, self.cp_size) for rank in range(self.cp_size)]
        )
        moved = self._on_device(row=gathered.argsort(), count=torch.ones_like(gathered))
        return Permutation.of(moved["row"], moved["count"])

    def in_packed_order(self, gathered: Tensor) -> Tensor:
        """The tokens [T, ...] that were gathered from the context-parallel ranks, sequence after
        sequence; with a gradient."""
        if self.cp_size == 1:
            return gathered
        return copy_tokens(gathered.flatten(1), self._packed_order).view(gathered.shape)

    @cached_property
    def varlen(self) -> _Varlen:
        """The plan of the variable-length kernel."""
        queries = self.segments.query_lengths
        keys = self.segments.key_lengths
        moved = self._on_device(queries=_bounds(queries), keys=_bounds(keys))
        return _Varlen(
            cu_seq_q=moved["queries"],
            cu_seq_k=moved["keys"],
            max_q=int(queries.max()),
            max_k=int(keys.max()),
        )

    @cached_property
    def padded(self) -> _Padded:
        """The plan of padded batches."""
        queries = self.segments.query_lengths
        keys = self.segments.key_lengths
        batches = _batches(queries.tolist(), keys.tolist())
        source, slot = _padding(batches, queries)
        tensors = {"source": source, "slot": slot}
        if keys is not queries:
            tensors["key_source"], tensors["key_slot"] = _padding(batches, keys)
            for i, segments in enumerate(batches):
                tensors[f"before_{i}"] = (keys - queries)[segments]
        moved = self._on_device(**tensors)
        buckets = tuple(
            _Bucket(
                rows=len(segments),
                queries=int(queries[segments].max()),
                keys=int(keys[segments].max()),
                before=moved.get(f"before_{i}"),
                least=int((keys - queries)[segments].min()),
            )
            for i, segments in enumerate(batches)
        )
        # torch copies to int64 indices only
        query_layout = (moved["source"], moved["slot"].long())
        if keys is queries:
            return _Padded(buckets, query_layout, query_layout)
        return _Padded(buckets, query_layout, (moved["key_source"], moved["key_slot"].long()))

    def rotation(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every local token, [t, 1, rotary.dim]: what ``rotate`` takes."""
        key = rotary, dtype
        if key not in self.rotations:
            moved = self._on_device(positions=self.positions, frequencies=rotary.frequencies())
            angles = (moved["positions"][:, None].float() * moved["frequencies"])[:, None]
            cos = (angles.cos() * rotary.cosine_scale).to(dtype)
            sin = (angles.sin() * rotary.cosine_scale).to(dtype)
            self.rotations[key] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self.rotations[key]

    def chunks(self, before: int) -> ChunkLayout:
        """The chunks of the delta rule, each with ``before`` tokens before it."""
        if before not in self.layouts:
            device = self.cu_seqlens_q.device
            self.layouts[before] = chunk_layout(
                self.cu_seqlens, before, self.cp_size, device=device
            )
        return self.layouts[before]

    @property
    def positions(self) -> Tensor:
        """Positions [t] int32 of the local tokens in their sequences, on the host."""
        starts = self.cu_seqlens[:-1]
        lengths = self.cu_seqlens.diff()
        local_tokens = zigzag_indices(self.cu_seqlens, self.cp_rank, self.cp_size).int()
        return local_tokens - starts.repeat_interleave(lengths // self.cp_size)

    def _on_device(self, **tensors: Tensor) -> dict[str, Tensor]:
        return copy_to_device(tensors, self.cu_seqlens_q.device)


def packed_sequences(
    cu_seqlens: Tensor, max_seqlen: int, cp_group: ProcessGroup, device: torch.device
) -> PackedSequences:
    """The parameters of one micro-batch.

    ``cu_seqlens`` [n + 1] int32 on the host, before context parallelism.
    """
    on_device = copy_to_device({"cu_seqlens": cu_seqlens}, device)["cu_seqlens"]
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cu_seqlens=cu_seqlens,
        cp_rank=cp_group.rank(),
        cp_size=cp_group.size(),
    )


def _bounds(lengths: Tensor) -> Tensor:
    """Where runs of ``lengths`` begin and end, int32 [m + 1]."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _batches(queries: list[int], keys: list[int]) -> list[list[int]]:
    """Segments of similar length together, by length; all of a batch have the same ratio of
    keys to queries.
    """
    ratio = [k // q for q, k in zip(queries, keys, strict=True)]
    batches: list[list[int]] = []
    for i in sorted(range(len(queries)), key=lambda i: (ratio[i], queries[i], i)):
        first = batches[-1][0] if batches else i
        if not batches or ratio[i] != ratio[first] or queries[i] > queries[first] * _BUCKET_RATIO:
            batches.append([])
        batches[-1].append(i)
    return batches


def _padding(batches: list[list[int]], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``source`` and ``slot`` of ``pad_rows`` for rows of ``lengths`` tokens in the padded
    ``batches``.
    """
    order = torch.tensor([segment for batch in batches for segment in batch])
    widths = torch.cat([lengths[batch].max().expand(len(batch)) for batch in batches])
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    last = (starts + lengths - 1)[order].repeat_interleave(widths)
    source = torch.minimum(concatenated_ranges(starts[order], widths), last)
    row_starts = torch.empty_like(lengths)
    row_starts[order] = widths.cumsum(0, dtype=torch.int32) - widths
    return source, concatenated_ranges(row_starts, lengths)


def takes_varlen(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's variable-length kernel, a flash attention, takes queries, keys and values
    of these kinds.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size <= _FLASH_HEAD_SIZE
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _has_varlen_options()
    )


@cache
def _has_varlen_options() -> bool:
    """Whether torch's kernel has the options that are used here; that of torch < 2.12 has not."""
    # Not imported at the top: with it comes torch's compiler, half a second of every start.
    from torch.nn.attention.varlen import varlen_attn

    options = inspect.signature(varlen_attn).parameters
    return {"scale", "window_size", "enable_gqa"} <= options.keys()


class PackedAttention(torch.nn.Module):
    """Core attention of a Megatron layer, with the signature that Megatron's ``SelfAttention``
    builds and calls.

    With ``rotary`` it also applies the rotary embedding, which the model would apply sequence by
    sequence. ``window``: the keys that a query attends, its own the last; None: all before it.
    ``sinks``: [heads] of this rank, or None.
    """

    rotary: Rotary | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout={config.attention_dropout}: must be 0; PackedAttention has no"
                " dropout"
            )
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: object,
    ) -> Tensor:
        """``query`` [t, heads, d], ``key`` [t, groups, d], ``value`` [t, groups, e], local tokens;
        returns [t, heads * e]."""
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                "PackedAttention needs packed_seq_params of mcore.attention.packed_sequences()"
            )
        plan = packed_seq_params
        sizes = (key.shape[-1], value.shape[-1])
        if self.rotary is not None:
            query = rotated(query, plan, self.rotary)
            key = rotated(key, plan, self.rotary)
        if self.cp_group.size() > 1:
            gathered = all_gather_tokens(torch.cat((key, value), dim=-1), self.cp_group)
            copies = copy_tokens(gathered.flatten(1), plan.key_copies)
            key, value = copies.unflatten(1, gathered.shape[1:]).split(sizes, dim=-1)
        width = max(sizes)
        attend = self._padded
        if takes_varlen(query.device, query.dtype, width):
            width = -(-width // _FLASH_HEAD_MULTIPLE) * _FLASH_HEAD_MULTIPLE
            attend = self._varlen
        elif self.sinks is not None:
            query, key = with_sink_dimension(query, key, self.sinks / self.softmax_scale)
            width = max(width, query.shape[-1])
        out = attend(plan, widened(query, width), widened(key, width), widened(value, width))
        if width > sizes[1]:
            out = out[..., : sizes[1]]
        return out.flatten(1)

    def _varlen(self, plan: PackedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The variable-length kernel.

        It aligns queries and keys at the ends of their segments, as we do.
        """
        bounds = plan.varlen
        lengths = bounds.cu_seq_q, bounds.cu_seq_k, bounds.max_q, bounds.max_k
        window = (-1 if self.window is None else self.window - 1, 0)  # its own key comes on top
        if self.sinks is not None:
            kernel = VarlenKernel(*lengths, self.softmax_scale, window)
            return sink_attention(query, key, value, self.sinks, kernel)
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query,
            key,
            value,
            *lengths,
            scale=self.softmax_scale,
            window_size=window,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # a pair only where the log-sums are requested
        return out

    def _padded(self, plan: PackedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of padded batches."""
        layout = plan.padded
        slots = [bucket.rows * bucket.queries for bucket in layout.buckets]
        key_slots = [bucket.rows * bucket.keys for bucket in layout.buckets]
        padded = zip(
            layout.buckets,
            _split(pad_rows(query, *layout.queries), slots),
            _split(pad_rows(key, *layout.keys), key_slots),
            _split(pad_rows(value, *layout.keys), key_slots),
            strict=True,
        )
        outputs = []
        for bucket, queries, keys, values in padded:
            out = self._attend_bucket(
                bucket,
                _by_head(queries, bucket.rows),
                _by_head(keys, bucket.rows),
                _by_head(values, bucket.rows),
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return unpad_rows(joined, layout.queries[1])

    def _attend_bucket(self, bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one padded batch. Masks are of bounded size: they are computed for a block
        of queries at a time and, if all of them are larger than that, again in the backward."""
        window = bucket.keys if self.window is None else min(self.window, bucket.keys)
        if bucket.before is None and window == bucket.keys and self.sinks is None:
            return self._sdpa(query, key, value, None)
        before = (
            query.new_zeros(bucket.rows, dtype=torch.int32)
            if bucket.before is None
            else bucket.before
        )
        width = min(window + bucket.keys - bucket.queries - bucket.least, bucket.keys)
        length = max(1, _MASK_ELEMENTS // (bucket.rows * width))
        if window < bucket.keys:
            length = min(length, max(window, _BLOCK_QUERIES))
            width = min(width + length, bucket.keys)
        if length >= bucket.queries:
            return self._sdpa(query, key, value, before)
        outputs = []
        for first in range(0, bucket.queries, length):
            start = max(bucket.least + first - window + 1, 0)
            stop = min(bucket.keys - bucket.queries + first + length, bucket.keys)
            block = (
                query[:, :, first : first + length],
                key[:, :, start:stop],
                value[:, :, start:stop],
                before + first - start,
            )
            if bucket.rows * bucket.queries * width <= _MASK_ELEMENTS:
                outputs.append(self._sdpa(*block))
            else:
                outputs.append(
                    checkpoint(self._sdpa, *block, use_reentrant=False, preserve_rng_state=False)
                )
        return torch.cat(outputs, dim=2)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, before: Tensor | None) -> Tensor:
        """Query i of a row attends its first ``before + i + 1`` keys, of these the last ``window``;
        ``before`` [rows], None: 0, without a window."""
        mask = None
        if before is not None:
            positions = torch.arange(query.shape[2], device=query.device)
            columns = torch.arange(key.shape[2], device=key.device)
            last = before[:, None, None] + positions[:, None]
            mask = columns <= last
            if self.window is not None:
                mask &= columns > last - self.window
            mask = mask[:, None]
        if self.sinks is not None:
            key, value, mask = with_sink_key(key, value, mask)
        if query.shape[1] != key.shape[1] and not _takes_groups(query, mask):
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a fast kernel for keys that several query heads attend: on a GPU only flash
    attention, which takes no mask.
    """
    if query.device.type != "cuda":
        return True
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return mask is None and is_half and query.shape[-1] <= _FLASH_HEAD_SIZE


def _split(x: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """``x.split(lengths)``, whose backward copies the gradient even of a single length."""
    return (x,) if len(lengths) == 1 else x.split(lengths)


def _by_head(x: Tensor, rows: int) -> Tensor:
    """``x`` [rows * length, heads, d] as [rows, heads, length, d]."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)


def rotated(x: Tensor, plan: PackedSequences, rotary: Rotary) -> Tensor:
    """``x`` [t, heads, d] with its first ``rotary.dim`` dimensions rotated."""
    cos, sin = plan.rotation(rotary, x.dtype)
    if rotary.dim == x.shape[-1]:
        return rotate(x, cos, sin, interleaved=rotary.interleaved)
    turned, rest = x.split((rotary.dim, x.shape[-1] - rotary.dim), dim=-1)
    return torch.cat((rotate(turned, cos, sin, interleaved=rotary.interleaved), rest), dim=-1)


def widened(x: Tensor, width: int) -> Tensor:
    """``x`` with its last dimension padded with zeros, which change no score and add no value."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
