"""What a pass found out about routes, brought together over all ranks: the ids by sample, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.data.sample import Sample
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.mcore.routing_replay.replay_pass import RoutingPass
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.statistics import expert_load

_PART_BYTES = 64 << 20  # ids are exchanged in parts of this size, so that a GPU holds little of them at once


@dataclass(frozen=True)
class RoutingFigures:
    """Figures of one pass over all its trained tokens and all ranks; float64 arrays by MoE layer.

    flip_rate: ``[layers]`` share of chosen experts that differ from the given routes; entropy: ``[layers]`` nats;
    load: ``[layers, experts]`` shares that sum to 1. None where the pass didn't ask, NaN where there was no token.
    flipped_tokens: share of tokens that differ in at least one layer; compared: the tokens that were compared.
    """

    flip_rate: np.ndarray | None
    flipped_tokens: float
    compared: float
    entropy: np.ndarray | None
    load: np.ndarray | None


def collect_routes(done: RoutingPass, samples: Sequence[Sample], wanted: Sequence[int]) -> list[np.ndarray]:
    """The routes that a pass recorded, ``[L - 1, layers, k]`` for each of ``wanted`` (positions in ``samples``), on
    every rank.

    Each id is known to exactly one rank, so adding zeros puts them together: one all-reduce over the world.
    """
    shape = done.task.shape
    lengths = np.zeros(len(samples), dtype=np.int64)
    lengths[list(wanted)] = [samples[i].length - 1 for i in wanted]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width = shape.k * shape.dtype.itemsize
    flat = torch.zeros(int(starts[-1]), shape.layers, width, dtype=torch.uint8)
    if done.counts:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to the host may be on their way
        for (chunk, micro_batch), table in done.tables.items():
            places, kept = _places(done, micro_batch, starts, lengths)
            for layer, index in enumerate(done.layers[chunk]):
                ids = table.chosen[layer].cpu().contiguous()
                flat[places, index] = ids.view(torch.uint8).view(-1, width)[kept]
    done.bytes_moved += _add_up(flat)
    rows = flat.numpy().view(shape.dtype)
    return [rows[starts[i] : starts[i] + lengths[i]] for i in wanted]


def collect_flips(done: RoutingPass, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Whether routing has touched each response token of a pass that compared: int8 ``[R]`` for each sample, on every
    rank. 1: its live choice differs from the given routes in at least one layer, 0: in none, -1: not compared.

    One all-reduce over the world of two bytes a token.
    """
    lengths = np.array([sample.length - 1 for sample in samples], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    flat = torch.zeros(int(starts[-1]), 2, dtype=torch.uint8)  # compared, chunks of layers that differ
    if done.counts:
        for (chunk, micro_batch), table in done.tables.items():
            if table.flipped is None:
                continue
            places, kept = _places(done, micro_batch, starts, lengths)
            known = table.known[kept.to(table.known.device)].cpu() > 0
            flat[places, 1] += (table.flipped.cpu()[kept] > 0).to(torch.uint8)
            if chunk == 0:  # the others see the same tokens
                flat[places, 0] = known.to(torch.uint8)
    _add_up(flat)
    compared, flipped = flat.numpy().T > 0
    found = np.where(compared, flipped, -1).astype(np.int8)
    return [
        found[start + sample.prompt_length - 1 : start + sample.length - 1]
        for start, sample in zip(starts, samples, strict=False)
    ]


def _places(done: RoutingPass, micro_batch: int, starts: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """(rows of all routes end to end, rows of this rank's table) of the tokens whose routes are wanted."""
    batch = done.batches[micro_batch]
    positions = torch.full((int(batch.cu_seqlens[-1]),), -1)
    for sample, first in zip(batch.sample_ids, batch.cu_seqlens.tolist(), strict=False):
        positions[first : first + lengths[sample]] = torch.arange(starts[sample], starts[sample] + lengths[sample])
    mine = positions[zigzag_indices(batch.cu_seqlens, done.groups.cp.rank(), done.groups.cp.size())]
    mine = mine[done.rows(len(mine))]
    kept = (mine >= 0).nonzero().squeeze(1)
    return mine[kept], kept


def _add_up(flat: Tensor) -> int:
    """All-reduce bytes in place; backends know no sum of wider unsigned integers. How many were reduced."""
    if dist.get_world_size() == 1:
        return 0
    for part in flat.view(-1).split(_PART_BYTES):
        moved = part.to(compute_device())
        dist.all_reduce(moved)
        part.copy_(moved)
    return flat.numel()


def routing_figures(done: RoutingPass) -> RoutingFigures:
    """Reduce the counts of a pass over all ranks; a collective of the world, after which every rank knows all."""
    shape, task = done.task.shape, done.task
    device = compute_device()
    flips, entropy = torch.zeros(2, shape.layers, dtype=torch.float64, device=device)
    load = torch.zeros(shape.layers, shape.num_experts, dtype=torch.float64, device=device)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # compared tokens, flipped ones, trained tokens
    if done.counts:
        for (chunk, _), table in done.tables.items():
            layers = done.layers[chunk]
            for layer, index in enumerate(layers):
                flips[index] += table.flips.get(layer, 0.0)
                entropy[index] += table.entropy.get(layer, 0.0)
            if task.describe and table.chosen:
                chosen = torch.stack([table.chosen[layer].to(device) for layer in range(len(layers))], dim=1)
                load[layers] += expert_load(chosen, table.weight, shape.num_experts)
            if chunk == 0:  # the others see the same tokens
                totals[0] += table.known.sum() * task.compare
                totals[2] += table.weight.sum()
    if task.compare:
        totals[1] = _flipped(done)
    everything = torch.cat([flips, entropy, load.view(-1), totals])
    dist.all_reduce(everything)
    flips, entropy, load, totals = everything.cpu().split([shape.layers, shape.layers, load.numel(), 3])
    compared, flipped, trained = totals.tolist()
    none = float("nan")
    return RoutingFigures(
        flip_rate=(flips / compared).numpy() if task.compare else None,
        flipped_tokens=flipped / compared if compared else none,
        compared=compared,
        entropy=(entropy / trained).numpy() if task.describe else None,
        load=(load / (trained * shape.k)).view(shape.layers, -1).numpy() if task.describe and task.record else None,
    )


def _flipped(done: RoutingPass) -> Tensor | float:
    """This rank's tokens that differ in at least one layer of any pipeline stage; counted by the first stage."""
    by_batch = []
    for micro_batch in range(len(done.batches)):
        tables = [table for (_, i), table in done.tables.items() if i == micro_batch]
        count = done.rows(len(done.batches[micro_batch].tokens) // done.groups.cp.size())
        flipped = torch.zeros(count.stop - count.start, dtype=torch.int32, device=compute_device())
        for table in tables:
            flipped += table.known.int() * (table.flipped if table.flipped is not None else 0)
        by_batch.append(flipped)
    layers = torch.cat(by_batch)
    dist.all_reduce(layers, group=done.groups.pp)
    return (layers > 0).sum().double() if done.counts and done.groups.pp.rank() == 0 else 0.0
