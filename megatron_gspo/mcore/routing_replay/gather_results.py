"""What a pass recorded and measured: expert ids and flips of this replica's samples, statistics of
all ranks.

Each function but `routing_stats` takes the ``MicroBatchRoutes`` of this rank's micro-batches. It is a
collective of the replica's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.data.columns import Columns, ranges
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.pass_counts import PassCounts, joined
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.statistics import RoutingStats

_PART_BYTES = 64 << 20  # ids are exchanged in parts of this size, which bounds the device memory


def routes_of_replica(
    micro_batches: Sequence[MicroBatchRoutes], wanted: Columns
) -> tuple[np.ndarray, int]:
    """The recorded routes in this rank's own layers, as a column ``[T, layers, k]`` of ``wanted``
    (some of the batch's ``inputs``), and the bytes that were exchanged. The row of a response's
    last token has no meaning.

    Exactly one rank of a pipeline stage has each id, so that a sum with zeros elsewhere is exact.
    """
    shape = micro_batches[0].options.shape
    groups = micro_batches[0].groups
    layers = sorted(micro_batches[0].layers)
    width = shape.k * shape.dtype.itemsize
    flat = torch.zeros(wanted.num_tokens, len(layers), width, dtype=torch.uint8)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # asynchronous copies to the host
    for routes in micro_batches:
        if routes.is_counted:
            targets, rows = _row_indices(routes, wanted)
            if layers:
                # [t, layers, k]
                ids = torch.stack([routes.chosen[layer] for layer in layers], 1).cpu()
                flat[targets] = ids.view(torch.uint8)[rows]
    moved = _sum_bytes(flat, (groups.tp, groups.cp))
    return flat.numpy().view(shape.dtype), moved


def flips_of_replica(micro_batches: Sequence[MicroBatchRoutes], batch: TrainingBatch) -> np.ndarray:
    """A column of the batch's responses, int8 ``[T]``: 1 where a response token's live choice
    differs from the given routes in at least one layer, 0 where it doesn't, -1 where it was not
    compared.

    Two bytes a token are exchanged.
    """
    inputs = batch.inputs
    # Compared, number of ranks with a layer that differs.
    flat = torch.zeros(inputs.num_tokens, 2, dtype=torch.uint8)
    for routes in micro_batches:
        if not routes.is_counted or routes.flipped is None:
            continue
        targets, rows = _row_indices(routes, inputs)
        flat[targets, 1] += (routes.flipped.cpu()[rows] > 0).to(torch.uint8)
        if 0 in routes.layers:  # the other pipeline stages see the same tokens
            flat[targets, 0] = (routes.known_weight.cpu()[rows] > 0).to(torch.uint8)
    groups = micro_batches[0].groups
    _sum_bytes(flat, (groups.tp, groups.cp, groups.pp))
    compared = flat[:, 0].numpy() > 0
    flipped = flat[:, 1].numpy() > 0
    flips = np.where(compared, flipped, -1).astype(np.int8)
    # The choice for the token before made a response token.
    response_lengths = batch.table["response_length"][inputs.positions].astype(np.int64)
    before = ranges(inputs.bounds[1:] - response_lengths - 1, response_lengths)
    return flips[before] if batch.has_loss else flips[:0]


def shared_experts_of_replica(
    micro_batches: Sequence[MicroBatchRoutes], batch: TrainingBatch
) -> np.ndarray:
    """A column ``[T, 3]`` of the batch's inputs: the share of the live choices in this rank's
    layers that are in the given routes of its own token, the next and the previous one. NaN where
    they weren't compared, or are on different ranks. Six bytes a token are exchanged.
    """
    groups = micro_batches[0].groups
    shape = micro_batches[0].options.shape
    # Experts + 1; 0: not compared.
    flat = torch.zeros(batch.inputs.num_tokens, 3, dtype=torch.int16)
    for routes in micro_batches:
        if not routes.is_counted or routes.shared is None:
            continue
        targets, rows = _row_indices(routes, batch.inputs)
        known = (
            torch.ones(len(rows), dtype=torch.bool)
            if routes.missing is None
            else ~routes.missing.cpu()[rows]
        )
        # Whether the next row is the next token's.
        after = (rows.diff() == 1) & (targets.diff() == 1)
        beside = torch.stack(
            [known, _shifted(after & known[1:], 0), _shifted(after & known[:-1], 1)]
        )
        flat[targets] = ((routes.shared.cpu()[:, rows] + 1) * (beside & known)).T
    _sum_bytes(flat.view(torch.uint8), (groups.tp, groups.cp))
    shares = flat.numpy().astype(np.float64) - 1.0
    shares[shares < 0] = np.nan
    return shares / (shape.k * max(1, len(micro_batches[0].layers)))


def _shifted(flags: Tensor, offset: int) -> Tensor:
    """``[n]`` from flags ``[n - 1]`` of neighbours: of the first of each pair, or with ``offset``
    1 of the second.
    """
    return torch.nn.functional.pad(flags, (offset, 1 - offset))


def _row_indices(routes: MicroBatchRoutes, wanted: Columns) -> tuple[Tensor, Tensor]:
    """(rows of the wanted samples' inputs end to end, rows of this rank's) of the tokens whose
    routes are wanted: all but the last of each row.
    """
    layout = routes.layout
    cp = routes.groups.cp
    starts = wanted.first_tokens
    targets = np.full(int(layout.cu_seqlens[-1]), -1)
    for row in layout.rows:
        if row.sample in starts:
            first = starts[row.sample] + row.offset
            fed = row.length - 1
            targets[row.start : row.start + fed] = np.arange(first, first + fed)
    if cp.size() > 1:
        targets = targets[zigzag_indices(layout.cu_seqlens, cp.rank(), cp.size()).numpy()]
    local = targets[routes.rows]
    rows = np.flatnonzero(local >= 0)
    return torch.from_numpy(local[rows]), torch.from_numpy(rows)


def _sum_bytes(flat: Tensor, groups: Sequence[dist.ProcessGroup]) -> int:
    """All-reduce bytes over the groups in place (backends sum no wider unsigned integers); returns
    how many were reduced."""
    shared = [group for group in groups if group.size() > 1]
    if not shared or not flat.numel():
        return 0
    for part in flat.view(-1).split(_PART_BYTES):
        moved = part.to(compute_device())
        for group in shared:
            dist.all_reduce(moved, group=group)
        part.copy_(moved)
    return flat.numel()


def routing_counts(micro_batches: Sequence[MicroBatchRoutes]) -> PassCounts:
    """What a pass counted. A collective of the pipeline."""
    counts = micro_batches[0].counts
    flipped = _flipped_tokens(micro_batches) if counts.options.compare else None
    # The other pipeline stages see the same tokens.
    of_tokens = [routes for routes in micro_batches if routes.is_counted and 0 in routes.layers]
    weights = [routes.weight for routes in of_tokens if routes.weight is not None]
    if weights:
        counts.totals[2] = joined(weights).sum(dtype=torch.float64)
    if weights and flipped is not None:
        known = joined([routes.known_weight for routes in of_tokens])
        counts.totals[0] = known.sum(dtype=torch.float64)
        counts.totals[1] = flipped
    return counts


def routing_stats(passes: Sequence[PassCounts]) -> list[RoutingStats]:
    """The statistics of passes over the trained tokens of all ranks, on every rank; one collective
    of the world for all."""
    everything = torch.cat([counts.numbers for counts in passes])
    dist.all_reduce(everything)
    of_passes = everything.cpu().split([len(counts.numbers) for counts in passes])
    return [
        _stats(counts.options, *numbers.split(counts.sizes))
        for counts, numbers in zip(passes, of_passes, strict=True)
    ]


def _stats(
    options: ReplayOptions, flips: Tensor, entropy: Tensor, load: Tensor, totals: Tensor
) -> RoutingStats:
    compared, flipped, trained = totals.tolist()
    shape = options.shape
    return RoutingStats(
        flip_rate=(flips / compared).numpy() if options.compare else None,
        flipped_tokens=flipped / compared if compared else float("nan"),
        compared=compared,
        entropy=(entropy / trained).numpy() if options.entropy else None,
        load=(load / (trained * shape.k)).view(shape.layers, -1).numpy() if len(load) else None,
    )


def _flipped_tokens(micro_batches: Sequence[MicroBatchRoutes]) -> Tensor:
    """The tokens of this rank's micro-batches that differ in at least one layer of any pipeline
    stage, []."""
    flipped = joined(
        [
            (
                torch.zeros(
                    routes.rows.stop - routes.rows.start, dtype=torch.int32, device=compute_device()
                )
                if routes.flipped is None
                else routes.known_weight.int() * routes.flipped
            )
            for routes in micro_batches
        ]
    )
    pipeline = micro_batches[0].groups.pp
    if pipeline.size() > 1:
        dist.all_reduce(flipped, group=pipeline)
    return (flipped > 0).sum()
