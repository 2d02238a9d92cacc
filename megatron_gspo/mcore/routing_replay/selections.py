"""How far the selections of sparse attention differ between two passes, on a sample of queries.

An indexer's selection is a discrete choice, as a router's: after an update, or in another engine, it
can select other positions. All passes of a step take the same micro-batches, so that both selections
of a query are on one rank, and nothing but a sum is exchanged. Those of the embedded engine are on
the rank that generated the response; queries that another rank trains are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch
from megatron_gspo.mcore.process_groups import compute_device

# Queries of a micro-batch whose selections are kept, at most, on each context-parallel rank. With
# 2,048 positions they take 128 KiB a layer.
QUERIES = 16

Query = tuple[int, int, int]
"""Prompt index, sample index and position of a token."""


def sampled_queries(shard: PackedBatch, topk: int) -> Tensor:
    """Rows [q] of the context-parallel shard: up to ``QUERIES`` tokens of those that have more than
    ``topk`` positions to select from, first the last ones that an engine feeds of their sequences,
    then others, each evenly spaced. Whether they are trained does not count: masks change between
    the passes of a step."""
    rows = (shard.is_fed & (shard.position_ids >= topk)).nonzero().squeeze(1)
    is_last = ~shard.is_fed.roll(-1)[rows]
    last = _evenly_spaced(rows[is_last], QUERIES)
    others = _evenly_spaced(rows[~is_last], QUERIES - len(last))
    return torch.cat((last, others)).sort().values


def _evenly_spaced(rows: Tensor, most: int) -> Tensor:
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most).round().long()]


def names_of(shard: PackedBatch, rows: Tensor) -> list[Query]:
    """The queries at these rows."""
    segments = shard.segment_ids[rows].tolist()
    positions = shard.position_ids[rows].tolist()
    return [
        (*shard.sequences[segment], position)
        for segment, position in zip(segments, positions, strict=True)
    ]


@dataclass
class SampledSelections:
    """The sampled selections of one micro-batch. rows: [q] int32 of the queries, on the device;
    by_layer: their selected positions in order, [q, topk] int32."""

    queries: list[Query]
    rows: Tensor
    by_layer: dict[int, Tensor] = field(default_factory=dict)

    def record(self, layer: int, selected: Tensor) -> None:
        """The selection [t, topk] of all tokens in a layer; kept once, not when the layer runs
        again."""
        if layer not in self.by_layer:
            chosen = selected.index_select(0, self.rows)
            self.by_layer[layer] = chosen.sort(dim=-1).values


def changed_counts(
    before: Sequence[SampledSelections], now: Sequence[SampledSelections], tp: dist.ProcessGroup
) -> Tensor:
    """[2] float64: the sum of the shares of selected positions that differ between two passes, over
    the layers and the sampled queries of the micro-batches that both have, and how many these are.
    tp: the tensor-parallel group, whose ranks have the same selections, so that one counts them.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=compute_device())
    earlier_of = {tuple(sampled.queries): sampled for sampled in before if sampled.queries}
    for later in now if tp.rank() == 0 else ():
        earlier = earlier_of.get(tuple(later.queries))
        if earlier is None:
            continue
        for layer, selected in later.by_layer.items():
            totals[0] += (1 - shared_share(earlier.by_layer[layer], selected)).sum()
            totals[1] += len(selected)
    return totals


def rollout_counts(
    sampled: Sequence[SampledSelections], of_engine: Mapping[Query, np.ndarray]
) -> Tensor:
    """Like `changed_counts`, between a pass and the rollout engine, whose selections [layers, topk]
    of some queries this rank has: all layers of the model, from the first."""
    totals = torch.zeros(2, dtype=torch.float64, device=compute_device())
    for of_pass in sampled:
        known = [row for row, query in enumerate(of_pass.queries) if query in of_engine]
        if not known:
            continue
        of_queries = np.stack([of_engine[of_pass.queries[row]] for row in known], axis=1)
        given = torch.from_numpy(of_queries).to(totals.device)  # [layers, queries, topk]
        rows = torch.tensor(known, device=totals.device)
        for layer, selected in of_pass.by_layer.items():
            totals[0] += (1 - shared_share(selected[rows], given[layer - 1])).sum()
            totals[1] += len(known)
    return totals


def changed_shares(counts: Sequence[Tensor]) -> list[float | None]:
    """The mean share that differs, of each of `changed_counts` over all ranks; None where no rank
    has a query. A collective of the world, one for all."""
    totals = torch.stack(list(counts))
    dist.all_reduce(totals)
    return [changed / count if count else None for changed, count in totals.tolist()]


def shared_share(one: Tensor, other: Tensor) -> Tensor:
    """Which share of the distinct numbers of each row [q, k] is in the same row of the other, [q]
    float64; the rows ascend."""
    places = torch.searchsorted(one, other).clamp_(max=one.shape[1] - 1)
    return (one.gather(1, places) == other).double().mean(1)
