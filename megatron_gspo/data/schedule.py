"""The packing schedule: the micro-batch and the rank of each sequence.

Invariants, for any valid input (tests/data/test_schedule.py):
1. every index 0 .. N-1 appears exactly once;
2. every rank has the same number K >= 1 of micro-batches, K % multiple_of == 0; some may be empty;
3. no micro-batch holds more than max_tokens;
4. K is the lower bound ceil(total / (num_ranks * max_tokens)) if largest-first placement reaches
   it, which fails only if bins are almost full or hold few sequences each; else the number that
   best-fit-decreasing needs;
5. micro-batch k has a similar load on every rank (ranks that exchange tokens wait for each other),
   and the sums over a rank's micro-batches are level; where no sequence is longer than the mean
   micro-batch, all micro-batches are (pipelines pad them to one length);
6. the result depends on the arguments alone. The largest micro-batch is first: running out of
    memory shows early.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Bins = list[list[int]]
Schedule = list[list[list[int]]]
Sized = tuple[int, int]  # tokens and index of a sequence
# Full bins that are skipped for one sequence before the attempt fails, which bounds the time.
_MOST_PASSED = 64
# Exchanges between bins of one level, which bounds the time; only large batches reach it.
_MOST_SWAPS = 4096
_MOST_TRIED = 4  # lightest bins that the heaviest tries
_CLOSE = 2000  # bins whose loads differ by less than this part of the heavier one are level


@dataclass(frozen=True)
class _Swap:
    """An exchange between two bins."""

    given: Sized
    """The sequence of the heavier bin."""

    taken: Sized | None
    """The sequence of the lighter bin; None: it gives none."""

    @property
    def moved(self) -> int:
        """Tokens by which the heavier bin gets lighter."""
        return self.given[0] - (0 if self.taken is None else self.taken[0])


def schedule(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    multiple_of: int = 1,
    at_least: int = 1,
) -> Schedule:
    """Distribute sequences over ranks and micro-batches with balanced numbers of tokens.

    Longest-processing-time-first (Graham 1969) with a target load per step, so that a sequence
    longer than the mean micro-batch meets similar ones on the other ranks; best-fit-decreasing if
    that overflows. Then the heaviest and lightest bins of a level exchange sequences, which
    balances bins with few sequences.

    Args:
        lengths: [N] tokens of every sequence, as packed (rounded up to the sequence multiple:
            `padded_length`).
        num_ranks: data-parallel ranks.
        max_tokens: maximum number of tokens of a micro-batch; make it a multiple of the packed
            total's multiple.
        multiple_of: the number of micro-batches of a rank is a multiple of this (for interleaved
            pipelines).
        at_least: smallest number of micro-batches of a rank.

    Returns:
        [rank][micro_batch] -> indices into `lengths`, ascending.

    Raises:
        ValueError: a sequence longer than max_tokens, which it names; an argument below 1.
    """
    for name, value in (
        ("num_ranks", num_ranks),
        ("max_tokens", max_tokens),
        ("multiple_of", multiple_of),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    sizes, order = _checked_order(lengths, max_tokens)
    step = num_ranks * multiple_of
    fewest = max(
        _ceil_to(-(-sum(sizes) // max_tokens), step), _ceil_to(at_least * num_ranks, step), step
    )
    bins = _level(sizes, order, fewest, num_ranks, max_tokens)
    if bins is None:
        packed = _best_fit(sizes, order, max_tokens)
        enough = max(_ceil_to(len(packed), step), fewest)
        bins = _level(sizes, order, enough, num_ranks, max_tokens) if enough > fewest else None
        if bins is None:
            bins = _exchange(packed + [[] for _ in range(enough - len(packed))], sizes)
    return _deal(bins, sizes, num_ranks)


@dataclass(frozen=True)
class ScheduleReport:
    """Quality of a schedule.

    num_microbatches: per rank.
    padding_share: padding tokens / packed tokens, without empty micro-batches.
    rank_imbalance: heaviest rank's tokens / mean rank's tokens - 1.
    step_imbalance: share of time lost if all ranks wait for each other after every micro-batch:
        sum_k max_rank load / sum_k mean_rank load - 1.
    fill: mean tokens of a micro-batch / max_tokens (NaN without max_tokens).
    """

    num_microbatches: int
    padding_share: float
    rank_imbalance: float
    step_imbalance: float
    fill: float


def schedule_report(
    plan: Schedule,
    lengths: Sequence[int],
    *,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    max_tokens: int | None = None,
) -> ScheduleReport:
    """Measure a schedule. `lengths` [N] are the true lengths; the multiples are the ones given
    to `pack`.
    """
    true = np.zeros((len(plan), len(plan[0])), dtype=np.int64)
    packed = np.zeros_like(true)
    for rank, micro_batches in enumerate(plan):
        for k, indices in enumerate(micro_batches):
            true[rank, k] = sum(int(lengths[i]) for i in indices)
            padded = sum(padded_length(int(lengths[i]), sequence_multiple) for i in indices)
            packed[rank, k] = _ceil_to(padded, np.lcm(sequence_multiple, total_multiple))
    total = int(packed.sum())
    if total == 0:
        return ScheduleReport(true.shape[1], 0.0, 0.0, 0.0, 0.0)
    return ScheduleReport(
        num_microbatches=true.shape[1],
        padding_share=1.0 - int(true.sum()) / total,
        rank_imbalance=float(packed.sum(axis=1).max() * len(plan) / total - 1.0),
        step_imbalance=float(packed.max(axis=0).sum() * len(plan) / total - 1.0),
        fill=float("nan") if max_tokens is None else total / (packed.size * max_tokens),
    )


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple of `multiple`."""
    return _ceil_to(length, multiple)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // int(multiple)) * int(multiple)


def _checked_order(lengths: Sequence[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """The lengths as a list, and their indices from longest to shortest (ties: lower index
    first).
    """
    array = np.asarray(lengths)
    if array.size == 0:
        return [], []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is a {array.ndim}-d {array.dtype} array; use a 1-d array of integers"
        )
    order = np.argsort(-array.astype(np.int64), kind="stable")
    longest = int(order[0])
    shortest = int(order[-1])
    if array[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {array[longest]} tokens but max_tokens is {max_tokens}; "
            "raise max_tokens or lower the response length"
        )
    if array[shortest] < 1:
        raise ValueError(f"sequence {shortest} has length {array[shortest]}; lengths start at 1")
    return array.tolist(), order.tolist()


def _level(
    sizes: list[int], order: list[int], num_bins: int, num_ranks: int, capacity: int
) -> Bins | None:
    """Level bins: with a target per step first, then one for all; None where neither fits."""
    targets = _step_targets(sizes, order, num_bins // num_ranks, num_ranks)
    if targets[0] > targets[-1]:
        bins = _fill(
            sizes, order, [target for target in targets for _ in range(num_ranks)], capacity
        )
        if bins is not None:
            # Rounding makes 1.
            bounds = [k for k in range(1, len(targets)) if targets[k - 1] > targets[k] + 1]
            ends = zip([0, *bounds], [*bounds, len(targets)], strict=True)
            return [
                members
                for first, last in ends
                for members in _exchange(bins[first * num_ranks : last * num_ranks], sizes)
            ]
    bins = _fill(sizes, order, [0] * num_bins, capacity)
    return None if bins is None else _exchange(bins, sizes)


def _exchange(bins: Bins, sizes: list[int]) -> Bins:
    """The same bins, better balanced: the heaviest gives one of the lightest a sequence, for a
    shorter one or for none, if that reduces their difference. No load exceeds the heaviest."""
    by_load = sorted((sum(map(sizes.__getitem__, members)), b) for b, members in enumerate(bins))
    # The sequences, ascending, of the bins that have exchanged something or tried to.
    opened: dict[int, list[Sized]] = {}
    for _ in range(_MOST_SWAPS):
        at, swap = _next_swap(bins, sizes, by_load, opened)
        if swap is None:
            break
        heavy, giver = by_load.pop()
        light, taker = by_load.pop(at)
        opened[giver].remove(swap.given)
        insort(opened[taker], swap.given)
        if swap.taken is not None:
            opened[taker].remove(swap.taken)
            insort(opened[giver], swap.taken)
        insort(by_load, (heavy - swap.moved, giver))
        insort(by_load, (light + swap.moved, taker))
    return [[i for _, i in opened[b]] if b in opened else members for b, members in enumerate(bins)]


def _next_swap(
    bins: Bins, sizes: list[int], by_load: list[tuple[int, int]], opened: dict[int, list[Sized]]
) -> tuple[int, _Swap | None]:
    """Which of the lightest bins the heaviest exchanges with (as a position in ``by_load``), and
    what; None if they are balanced or no exchange helps. Adds the bins that it examines to
    `opened`."""
    heavy, giver = by_load[-1]
    for at, (light, taker) in enumerate(by_load[:_MOST_TRIED]):
        if heavy - light <= max(heavy // _CLOSE, 1):
            break
        for b in (giver, taker):
            if b not in opened:
                opened[b] = sorted((sizes[i], i) for i in bins[b])
        swap = _best_swap(opened[giver], opened[taker], heavy - light)
        if swap is not None:
            return at, swap
    return 0, None


def _best_swap(heavy: list[Sized], light: list[Sized], gap: int) -> _Swap | None:
    """A sequence of ``heavy`` and one of ``light`` (None: none) whose exchange comes closest to
    moving half of the gap; None where each would move nothing or all of it and more. Both ascend.
    """
    best = gap  # twice the distance to half of the gap; below the gap where an exchange helps
    best_swap: _Swap | None = None
    for given in heavy:
        at = bisect_right(light, (given[0] - gap // 2, -1))
        for taken in (None, *light[max(at - 1, 0) : at + 1]):
            moved = given[0] - (0 if taken is None else taken[0])
            if 0 < moved < gap and abs(2 * moved - gap) < best:
                best = abs(2 * moved - gap)
                best_swap = _Swap(given, taken)
    return best_swap


def _step_targets(sizes: list[int], order: list[int], num_steps: int, num_ranks: int) -> list[int]:
    """Target load of each step: the mean of what is left, or the longest sequence that must go
    there.
    """
    targets = []
    remaining = sum(sizes)
    for k in range(num_steps):
        longest = sizes[order[k * num_ranks]] if k * num_ranks < len(order) else 0
        mean = -(-remaining // (num_ranks * (num_steps - k)))
        target = max(longest, mean)
        targets.append(target)
        remaining -= target * num_ranks
    return targets


def _fill(sizes: list[int], order: list[int], targets: list[int], capacity: int) -> Bins | None:
    """Each sequence, longest first, into the bin furthest below its target that takes it; None:
    too full.
    """
    bins: Bins = [[] for _ in targets]
    heap = [(-target, b) for b, target in enumerate(targets)]
    heapq.heapify(heap)
    for index in order:
        passed = []
        while heap and heap[0][0] + targets[heap[0][1]] + sizes[index] > capacity:
            passed.append(heapq.heappop(heap))
            if len(passed) == _MOST_PASSED:
                return None
        if not heap:
            return None
        excess, b = heap[0]
        bins[b].append(index)
        heapq.heapreplace(heap, (excess + sizes[index], b))
        for entry in passed:
            heapq.heappush(heap, entry)
    return bins


def _best_fit(sizes: list[int], order: list[int], capacity: int) -> Bins:
    """Each sequence, longest first, into the fullest bin that takes it; a new bin where none
    does.
    """
    bins: Bins = []
    by_room: dict[int, list[int]] = {}
    # Sorted keys of by_room; at most `capacity` of them, so that insertion stays cheap.
    rooms: list[int] = []
    for index in order:
        size = sizes[index]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            b = by_room[room].pop()
            if not by_room[room]:
                del by_room[room]
                del rooms[at]
        else:
            room = capacity
            b = len(bins)
            bins.append([])
        bins[b].append(index)
        room -= size
        if room not in by_room:
            by_room[room] = []
            insort(rooms, room)
        by_room[room].append(b)
    return bins


def _deal(bins: Bins, sizes: list[int], num_ranks: int) -> Schedule:
    """Bins to ranks: num_ranks bins of neighbouring load make a step; the lightest rank takes
    the largest.
    """
    loads = [sum(sizes[i] for i in members) for members in bins]
    by_load = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    plan: Schedule = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for first in range(0, len(bins), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for rank, b in zip(ranks, by_load[first : first + num_ranks], strict=True):
            plan[rank].append(sorted(bins[b]))
            totals[rank] += loads[b]
    return plan
