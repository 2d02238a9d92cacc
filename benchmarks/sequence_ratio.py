"""GSPO's sequence ratio under context parallelism: one all-reduce per micro-batch against collectives per sequence.

- *ours*: the sums of log-ratios and the token counts of all sequences in one [2, sequences] float64 all-reduce without
  autograd; every rank's tokens carry their own gradient, so the backward has no collective.
- *all-reduce a sequence*: sum and count of each sequence through a differentiable all-reduce: two forward and two
  backward collectives a sequence.
- *all-gather a sequence*: each sequence's log-ratios gathered whole, differentiably: one forward and one backward.

Forward and backward of `sum_i A_i s_i` from a rank's own tokens of a packed micro-batch; values and gradients are
checked against each other, the collectives are counted by the process group. Bytes are what a rank hands to its
collectives. The processes are on one machine: between machines every collective costs more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row, Seconds, count_row, run_from_command_line, say, time_row
from benchmarks.worlds import World, in_turns
from megatron_gspo.algorithms.ratio import sequence_ratio
from megatron_gspo.algorithms.segments import segment_sums
from megatron_gspo.parallel.context_parallel import sum_over

OURS, REDUCED, GATHERED = "ours", "all-reduce a sequence", "all-gather a sequence"
RANKS, SEQUENCES = (2, 4), (8, 64, 512)
LIMIT = 20.0  # of log-ratios, in nats

Found = tuple[Tensor, Tensor]  # ratios [n], gradient of the log-probs [n * tokens]


class _AllReduce(torch.autograd.Function):
    """Sum over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class _AllGather(torch.autograd.Function):
    """All ranks' values after each other; the backward sums and gives every rank its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def collectives(way: str, sequences: int) -> int:
    """Of one forward and backward."""
    return {OURS: 1, REDUCED: 4 * sequences, GATHERED: 2 * sequences}[way]


def payload(way: str, sequences: int, tokens: int, ranks: int) -> int:
    """Bytes that a rank hands to the collectives of one forward and backward; ``tokens``: of a sequence, on a rank."""
    gathered = 4 * tokens * sequences * (1 + ranks)
    return {OURS: 2 * 8 * sequences, REDUCED: 4 * 4 * sequences, GATHERED: gathered}[way]


def packed(log_probs: Tensor, old: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """Ours, by the functions that ``policy_loss`` calls: ratios [n], and the backward."""
    count = len(advantages)
    live = (log_probs - old).detach()
    sums = torch.stack([segment_sums(live, ids, count), segment_sums(torch.ones_like(live), ids, count)])
    total, lengths = sum_over(dist.group.WORLD)(sums)
    ratio, *_ = sequence_ratio(log_probs, total / lengths, ids, LIMIT)
    (ratio * (advantages / lengths.float()).index_select(0, ids)).sum().backward()
    return (total / lengths).exp().float()


def by_sequence(log_probs: Tensor, old: Tensor, tokens: int, advantages: Tensor, way: str) -> Tensor:
    """A loop over sequences with collectives in each: ratios [n], and the backward."""
    ratios = []
    for live in (log_probs - old).split(tokens):
        if way == REDUCED:
            mean = _AllReduce.apply(live.sum()) / _AllReduce.apply((live * 0 + 1).sum())
        else:
            mean = _AllGather.apply(live).mean()
        ratios.append(mean.clamp(-LIMIT, LIMIT).exp())
    found = torch.stack(ratios)
    # Every rank computes the whole loss, and the collectives' backward sums over the ranks.
    ((found * advantages).sum() / dist.get_world_size()).backward()
    return found.detach()


def prepare(rank: int, ranks: int, sequences: int, tokens: int) -> Mapping[str, Callable[[], None]]:
    """What the ranks time, after a check of results and of the number of collectives (``RuntimeError``)."""
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(sequences, generator=generator)
    old, drift = -torch.rand(2, ranks, sequences * tokens, generator=generator)
    ids = torch.arange(sequences).repeat_interleave(tokens)

    def run(way: str) -> Found:
        leaf = (old[rank] + 0.01 * drift[rank]).requires_grad_()
        if way == OURS:
            ratios = packed(leaf, old[rank], ids, advantages)
        else:
            ratios = by_sequence(leaf, old[rank], tokens, advantages, way)
        assert leaf.grad is not None
        return ratios, leaf.grad

    expected: Found | None = None
    for way in (OURS, REDUCED, GATHERED):
        before = dist.group.WORLD._get_sequence_number_for_group()
        found = run(way)
        counted = dist.group.WORLD._get_sequence_number_for_group() - before
        if counted != collectives(way, sequences):
            raise RuntimeError(f"{way}: {counted} collectives, not {collectives(way, sequences)}")
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))
    return {way: lambda way=way: run(way) and None for way in (OURS, REDUCED, GATHERED)}


def rows_of(ranks: int, sequences: int, tokens: int, taken: Mapping[str, list[Seconds]]) -> list[Row]:
    """Time against each alternative; collectives and bytes, which grow with the sequences, for one size."""
    name = f"sequence ratio, {sequences} sequences, CP {ranks}"
    rows = []
    for way in (REDUCED, GATHERED):
        rows.append(time_row("sequence_ratio", f"{name}: time", taken[OURS], taken[way], peer_name=way, target=1.0))
    for way in (REDUCED, GATHERED) if sequences == SEQUENCES[1] else ():
        rows.append(count_row("sequence_ratio", f"{name}: collectives", collectives(OURS, sequences),
                              collectives(way, sequences), unit="a micro-batch", peer_name=way))  # fmt: skip
        rows.append(count_row("sequence_ratio", f"{name}: payload", payload(OURS, sequences, tokens, ranks),
                              payload(way, sequences, tokens, ranks), unit="bytes", peer_name=way))  # fmt: skip
    return rows


def measure(args: argparse.Namespace) -> list[Row]:
    """Rows for every number of ranks and sequences."""
    rows = []
    for ranks in RANKS:
        for sequences in SEQUENCES[:2] if args.quick else SEQUENCES:
            tokens = args.tokens // ranks
            say(f"{sequences} sequences, CP {ranks}")
            with World(ranks, prepare, sequences, tokens) as world:
                world.ready()  # the check there is the warm-up
                taken = in_turns({way: (world, way) for way in (OURS, REDUCED, GATHERED)}, args.repeats,
                                 args.seconds / len(RANKS) / len(SEQUENCES), warmup=0)  # fmt: skip
            rows += rows_of(ranks, sequences, tokens, taken)
    return rows


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 15, "tokens": 256}, seconds=30)


if __name__ == "__main__":
    main()
