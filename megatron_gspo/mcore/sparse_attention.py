"""Multi-head latent attention over the positions that an indexer selects (DeepSeek-V3.2, GLM-5),
over packed sequences.

Sequences that are no longer than the number of selected positions have full attention. Others are
computed for a block of queries at a time, with a mask of the selected keys, and again in the
backward pass: memory is linear in the number of tokens, time is that of full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.attention import PackedAttention, PackedSequences, widened
from megatron_gspo.mcore.indexer import Indexer
from megatron_gspo.mcore.latent_attention import Attend, LatentAttention
from megatron_gspo.mcore.token_runs import TokenRun
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.context_parallel import all_gather_tokens

# Elements of a block's mask (queries * keys), and its queries, at most: those of a block all have
# the keys of its last one computed.
_MASK_ELEMENTS = 2**23
_BLOCK_QUERIES = 512


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of a sequence: their rows, the position of the first, and the rows of the
    keys up to the last query's."""

    rows: slice
    position: int
    keys: slice


def _blocks(runs: Sequence[TokenRun]) -> list[_Block]:
    blocks = []
    for run in runs:
        most_keys = run.position + run.length
        size = max(1, min(_BLOCK_QUERIES, _MASK_ELEMENTS // most_keys))
        for offset in range(0, run.length, size):
            last = min(offset + size, run.length)
            rows = slice(run.row + offset, run.row + last)
            keys = slice(run.start, run.start + run.position + last)
            blocks.append(_Block(rows, run.position + offset, keys))
    return blocks


class SparseAttention(PackedAttention):
    """``PackedAttention`` with the indexer of its layer, where Megatron's has it."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        *,
        softmax_scale: float,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        self.indexer = Indexer(config, shape, pg_collection)

    def attend_selected(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sequences: PackedSequences,
        selected: Tensor,
    ) -> Tensor:
        """``query``, ``key`` [t, heads, d] and ``value`` [t, heads, e], local tokens; ``selected``
        [t, k]: see `Indexer.forward`. Returns [t, heads * e]."""
        sizes = (key.shape[-1], value.shape[-1])
        if self.cp_group.size() > 1:
            gathered = all_gather_tokens(torch.cat((key, value), dim=-1), self.cp_group)
            key, value = sequences.in_packed_order(gathered).split(sizes, dim=-1)
        width = max(sizes)
        blocks = _blocks(sequences.runs)
        out = _SelectedAttention.apply(
            widened(query, width),
            widened(key, width),
            widened(value, width),
            selected,
            blocks,
            self.softmax_scale,
        )
        return out[..., : sizes[1]].flatten(1)


class _SelectedContext(AutogradContext, Protocol):
    blocks: list[_Block]
    scale: float


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SelectedContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selected: Tensor,
        blocks: list[_Block],
        scale: float,
    ) -> Tensor:
        """``query`` [t, heads, d], ``key`` and ``value`` [T, heads, d] in their packed order;
        [t, heads, d]."""
        ctx.blocks = blocks
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, selected)
        out = torch.empty_like(query)
        for block in blocks:
            mask = _mask(block, selected)
            out[block.rows] = _attention(
                query[block.rows], key[block.keys], value[block.keys], mask, scale
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _SelectedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, selected = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Sums over many blocks, which low precision would round.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        for block in ctx.blocks:
            q, k, v = (
                x.detach().requires_grad_()
                for x in (query[block.rows], key[block.keys], value[block.keys])
            )
            with torch.enable_grad():
                out = _attention(q, k, v, _mask(block, selected), ctx.scale)
            of_query, of_key, of_value = torch.autograd.grad(out, (q, k, v), grad[block.rows])
            grad_query[block.rows] = of_query
            grad_key[block.keys] += of_key
            grad_value[block.keys] += of_value
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _mask(block: _Block, selected: Tensor) -> Tensor:
    """Which keys the queries of a block attend, [queries, keys] bool."""
    chosen = selected[block.rows]
    count = block.keys.stop - block.keys.start
    columns = torch.arange(count, device=selected.device)
    own = block.position + torch.arange(len(chosen), device=selected.device)
    mask = columns <= own[:, None]
    if count > chosen.shape[1]:
        mask &= torch.zeros_like(mask).scatter_(1, chosen.long(), True)
    return mask


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The attention of one block of queries: [queries, heads, d]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None], scale=scale)
    return out[0].transpose(0, 1)


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer, of a ``shape`` with the sizes of both."""

    core_attention: SparseAttention

    def _core_attention(self, shape: ModelShape, groups: ProcessGroupCollection) -> SparseAttention:
        return SparseAttention(
            self.config, shape, softmax_scale=self.softmax_scale, pg_collection=groups
        )

    def attention(
        self, hidden_states: Tensor, query_latent: Tensor, sequences: PackedSequences
    ) -> Attend:
        selected = self.core_attention.indexer(hidden_states, query_latent, sequences)
        if selected is None:
            return super().attention(hidden_states, query_latent, sequences)
        if sequences.routes is not None and sequences.routes.selections is not None:
            sequences.routes.selections.record(self.layer_number, selected)
        return partial(self.core_attention.attend_selected, sequences=sequences, selected=selected)
