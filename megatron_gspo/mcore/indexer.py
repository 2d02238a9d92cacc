"""Which positions a query attends in sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section
2.1).

An indexer scores every position of a sequence up to the query's own,
``sum over its heads of weight * relu(query . key)``, and selects the ``topk`` best. The selection
has no gradient and the indexer's weights are frozen.

Nothing of the size of queries times keys is kept: scores are computed for a block of queries at a
time. Each tensor-parallel rank selects for its own tokens, with the keys of all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.mcore.attention import PackedSequences
from megatron_gspo.mcore.norms import device_of
from megatron_gspo.mcore.operators import rotate
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.parallel.collectives import gather_rows

# Elements of a block's scores, at most (heads * queries * keys), in float32 or wider.
_SCORE_ELEMENTS = 2**26


class FrozenLinear(torch.nn.Linear):
    """A product with a weight that is not trained, whole on every tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__(
            inputs, outputs, bias=False, dtype=config.params_dtype, device=device_of(config)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Megatron's initialization takes the place of torch's."""


class Indexer(torch.nn.Module):
    """The indexer of a layer, with the names that Megatron's has.

    Positive factors of the scores are left out: they change no selection.
    """

    def __init__(
        self, config: TransformerConfig, shape: ModelShape, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        assert shape.indexer is not None and shape.latent is not None
        assert shape.latent.query_rank is not None
        sizes = shape.indexer
        self.sizes = sizes
        self.rotary = replace(shape.rotary, interleaved=sizes.interleaved)
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        rank = shape.latent.query_rank
        self.linear_wq_b = FrozenLinear(rank, sizes.heads * sizes.head_dim, config)
        self.linear_wk = FrozenLinear(config.hidden_size, sizes.head_dim, config)
        self.linear_weights_proj = FrozenLinear(config.hidden_size, sizes.heads, config)
        self.k_norm = torch.nn.LayerNorm(
            sizes.head_dim, eps=sizes.norm_eps, dtype=torch.float32, device=device_of(config)
        ).requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, query_latent: Tensor, sequences: PackedSequences
    ) -> Tensor | None:
        """The positions in its sequence that each of all ``t`` local tokens attends, [t, topk]
        int32; those behind a token's own mean nothing. None where no sequence is longer than that:
        each query attends all positions up to its own.

        ``hidden_states`` [s, 1, h] and ``query_latent`` [s, 1, r]: this tensor-parallel rank's
        part.
        """
        if sequences.longest <= self.sizes.topk:
            return None
        own = hidden_states.shape[0]
        first = own * self.tp_group.rank()
        rows = slice(first, first + own)
        hidden = hidden_states[:, 0]
        query = F.linear(query_latent[:, 0], self.linear_wq_b.weight)
        query = self._rotated(query.view(own, self.sizes.heads, -1), rows, sequences)
        key = self._normalised(F.linear(hidden, self.linear_wk.weight))
        key = self._rotated(key[:, None], rows, sequences)[:, 0]
        weights = F.linear(_wide(hidden), _wide(self.linear_weights_proj.weight))
        key = gather_rows(gather_rows(key, self.tp_group), self.cp_group)
        key = sequences.in_packed_order(key)
        return gather_rows(self._select(query, weights, key, first, sequences), self.tp_group)

    def _normalised(self, key: Tensor) -> Tensor:
        wide = _wide(key)
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        unit = centred * (variance + self.k_norm.eps).rsqrt()
        weight = self.k_norm.weight.to(wide.dtype)
        bias = self.k_norm.bias.to(wide.dtype)
        return (unit * weight + bias).to(key.dtype)

    def _rotated(self, x: Tensor, rows: slice, sequences: PackedSequences) -> Tensor:
        """``x`` [s, heads, d] of the local tokens ``rows`` with its first dimensions rotated."""
        cos, sin = sequences.rotation(self.rotary, x.dtype)
        turned, rest = x.split((self.rotary.dim, x.shape[-1] - self.rotary.dim), dim=-1)
        turned = rotate(turned, cos[rows], sin[rows], interleaved=self.rotary.interleaved)
        return torch.cat((turned, rest), dim=-1)

    def _select(
        self, query: Tensor, weights: Tensor, key: Tensor, first: int, sequences: PackedSequences
    ) -> Tensor:
        """Positions [s, topk] int32 for ``query`` [s, heads, d] and ``weights`` [s, heads] of the
        local tokens from ``first`` on; ``key`` [T, d] of all tokens in their packed order."""
        topk = self.sizes.topk
        selected = torch.arange(topk, dtype=torch.int32, device=query.device)
        selected = selected.repeat(len(query), 1)  # of the queries that attend all before them
        for run in sequences.runs:
            most_keys = run.position + run.length
            rows = max(1, _SCORE_ELEMENTS // (self.sizes.heads * most_keys))
            begin = max(run.row, first, run.row + topk - run.position)
            end = min(run.row + run.length, first + len(query))
            for row in range(begin, end, rows):
                block = slice(row - first, min(row + rows, end) - first)
                position = run.position + row - run.row
                stop = position + block.stop - block.start
                keys = key[run.start : run.start + stop]
                scores = _scores(query[block], weights[block], keys, position)
                selected[block] = scores.topk(topk, dim=-1, sorted=False).indices.int()
        return selected


def _scores(query: Tensor, weights: Tensor, key: Tensor, position: int) -> Tensor:
    """Scores [b, k] of the first ``k`` positions of a sequence by the queries [b, heads, d] at
    ``position`` and after it; -inf behind a query's own. In float32 or wider."""
    products = torch.matmul(_wide(query), _wide(key).t()).relu_()
    scores = torch.bmm(weights[:, None], products)[:, 0]
    columns = torch.arange(len(key), device=key.device)
    own = position + torch.arange(len(query), device=key.device)
    return scores.masked_fill_(columns > own[:, None], -torch.inf)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_norms_wide(model: torch.nn.Module) -> None:
    """Keep the norms of all indexers in float32 whatever the model's type, as DeepSeek's own code
    has them.
    """
    for module in model.modules():
        if isinstance(module, Indexer):
            module.k_norm.float()
