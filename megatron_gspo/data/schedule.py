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
from functools import cached_property
from typing import NamedTuple

import numpy as np

Bins = list[list[int]]
Schedule = list[list[list[int]]]
Weighed = tuple[int, int, int]  # cost, tokens and index of a sequence
# Exchanges between bins of one level, which bounds the time; only large batches reach it.
_MOST_SWAPS = 4096
_MOST_TRIED = 4  # lightest bins that the heaviest tries
_CLOSE = 2000  # bins whose loads differ by less than this part of the heavier one are level


@dataclass(frozen=True)
class _Work:
    """The sequences that are distributed."""

    sizes: list[int]
    """[N] tokens of each."""

    costs: list[int]
    """[N] what is levelled."""

    @cached_property
    def order(self) -> list[int]:
        """[N] indices from the costliest to the cheapest (ties: lower index first)."""
        return np.argsort(-np.array(self.costs, dtype=np.int64), kind="stable").tolist()

    def cost(self, members: Sequence[int]) -> int:
        """The cost of some sequences together."""
        return sum(map(self.costs.__getitem__, members))


@dataclass
class _OpenBin:
    """A bin that exchanges sequences."""

    members: list[Weighed]
    """Ascending."""

    room: int
    """Tokens that it still takes."""

    @classmethod
    def of(cls, members: Sequence[int], work: _Work, capacity: int) -> _OpenBin:
        weighed = sorted((work.costs[i], work.sizes[i], i) for i in members)
        return cls(weighed, capacity - sum(size for _, size, _ in weighed))

    def replace(self, old: Weighed | None, new: Weighed | None) -> None:
        """Give one sequence and take another."""
        if old is not None:
            self.members.remove(old)
            self.room += old[1]
        if new is not None:
            insort(self.members, new)
            self.room -= new[1]


class _Swap(NamedTuple):
    """An exchange between two bins."""

    given: Weighed
    """The sequence of the heavier bin."""

    taken: Weighed | None
    """The sequence of the lighter bin; None: it gives none."""

    @property
    def moved(self) -> int:
        """Cost by which the heavier bin gets lighter."""
        return self.given[0] - (0 if self.taken is None else self.taken[0])


def schedule(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
    multiple_of: int = 1,
    targets: Sequence[int] = (),
) -> Schedule:
    """Distribute sequences over ranks and micro-batches with balanced costs.

    Longest-processing-time-first (Graham 1969) with a target load per step, so that a sequence
    that costs more than the mean micro-batch meets similar ones on the other ranks. Where bins are
    too full for that, their tokens are levelled instead, or packed best-fit-decreasing. Then the
    heaviest and lightest bins of a level, and of a step, exchange sequences.

    Args:
        lengths: [N] tokens of every sequence, as packed (rounded up to the sequence multiple:
            `padded_length`).
        num_ranks: data-parallel ranks.
        max_tokens: maximum number of tokens of a micro-batch; make it a multiple of the packed
            total's multiple.
        costs: [N] cost of every sequence in any unit, at least 1; None: its tokens.
        multiple_of: the number of micro-batches of a rank is a multiple of this (for interleaved
            pipelines).
        targets: cost of each micro-batch of a rank that is aimed at, the largest first
            (`step_targets`): a rank has at least so many. Empty: computed here.

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
    sizes = _checked_lengths(lengths, max_tokens)
    by_tokens = _Work(sizes, sizes)
    work = by_tokens if costs is None else _Work(sizes, _checked_costs(costs, len(sizes)))
    step = num_ranks * multiple_of
    fewest = padded_length(max(-(-sum(sizes) // max_tokens), len(targets) * num_ranks, 1), step)
    bins = _level(work, by_tokens, fewest, num_ranks, max_tokens, targets)
    if bins is None:
        packed = _best_fit(by_tokens, max_tokens)
        enough = max(padded_length(len(packed), step), fewest)
        if enough > fewest:
            bins = _level(work, by_tokens, enough, num_ranks, max_tokens, targets)
        if bins is None:
            bins = _exchange(packed + [[] for _ in range(enough - len(packed))], work, max_tokens)
    return _deal(bins, work, num_ranks, max_tokens)


def step_targets(costs: Sequence[np.ndarray], num_steps: int) -> list[int]:
    """[num_steps]: the cost that every rank aims at in a step, where `costs` has those of each
    rank's sequences.
    """
    costliest = np.zeros(num_steps, dtype=np.int64)
    for of_rank in costs:
        largest = np.sort(of_rank)[::-1][:num_steps]
        costliest[: len(largest)] = np.maximum(costliest[: len(largest)], largest)
    total = sum(int(of_rank.sum()) for of_rank in costs)
    return _step_targets(total, costliest.tolist(), len(costs))


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def _checked_lengths(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """The lengths as a list."""
    array = np.asarray(lengths)
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is a {array.ndim}-d {array.dtype} array; use a 1-d array of integers"
        )
    longest = int(np.argmax(array))
    shortest = int(np.argmin(array))
    if array[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {array[longest]} tokens but max_tokens is {max_tokens}; "
            "raise max_tokens or lower the response length"
        )
    if array[shortest] < 1:
        raise ValueError(f"sequence {shortest} has length {array[shortest]}; lengths start at 1")
    return array.tolist()


def _checked_costs(costs: Sequence[int], count: int) -> list[int]:
    """The costs as a list."""
    array = np.asarray(costs)
    if array.size == 0 == count:
        return []
    if array.shape != (count,) or array.dtype.kind not in "iu" or array.min() < 1:
        raise ValueError(
            f"costs is a {array.dtype} array of shape {list(array.shape)}; give {count} integers"
            " from 1"
        )
    return array.tolist()


def _level(
    work: _Work,
    by_tokens: _Work,
    num_bins: int,
    num_ranks: int,
    capacity: int,
    given_targets: Sequence[int],
) -> Bins | None:
    """Bins of level costs; where they are too full for that, of level tokens; None where neither
    fits. Each with a target per step first, then one for all."""
    for filled_by in (work, by_tokens) if work is not by_tokens else (work,):
        targets = list(given_targets)
        if len(targets) * num_ranks != num_bins or filled_by is not work:
            costliest = [filled_by.costs[i] for i in filled_by.order[:num_bins:num_ranks]]
            costliest += [0] * (num_bins // num_ranks - len(costliest))
            targets = _step_targets(sum(filled_by.costs), costliest, num_ranks)
        if targets[0] > targets[-1]:
            bins = _fill(
                filled_by, [target for target in targets for _ in range(num_ranks)], capacity
            )
            if bins is not None:
                # Rounding makes 1.
                bounds = [k for k in range(1, len(targets)) if targets[k - 1] > targets[k] + 1]
                ends = zip([0, *bounds], [*bounds, len(targets)], strict=True)
                return [
                    members
                    for first, last in ends
                    for members in _exchange(
                        bins[first * num_ranks : last * num_ranks], work, capacity
                    )
                ]
        bins = _fill(filled_by, [0] * num_bins, capacity)
        if bins is not None:
            return _exchange(bins, work, capacity)
    return None


def _exchange(bins: Bins, work: _Work, capacity: int) -> Bins:
    """The bins, better balanced: the heaviest gives one of the lightest a sequence, for a
    cheaper one or for none, if that reduces their difference. No load exceeds the heaviest, and no
    bin its capacity."""
    costs = work.costs
    by_load = sorted((sum(map(costs.__getitem__, members)), b) for b, members in enumerate(bins))
    opened: dict[int, _OpenBin] = {}
    for _ in range(_MOST_SWAPS):
        at, swap = _next_swap(bins, work, capacity, by_load, opened)
        if swap is None:
            break
        heavy, giver = by_load.pop()
        light, taker = by_load.pop(at)
        opened[giver].replace(swap.given, swap.taken)
        opened[taker].replace(swap.taken, swap.given)
        insort(by_load, (heavy - swap.moved, giver))
        insort(by_load, (light + swap.moved, taker))
    return [
        [i for _, _, i in opened[b].members] if b in opened else members
        for b, members in enumerate(bins)
    ]


def _next_swap(
    bins: Bins,
    work: _Work,
    capacity: int,
    by_load: list[tuple[int, int]],
    opened: dict[int, _OpenBin],
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
                opened[b] = _OpenBin.of(bins[b], work, capacity)
        swap = _best_swap(opened[giver], opened[taker], heavy - light)
        if swap is not None:
            return at, swap
    return 0, None


def _best_swap(heavy: _OpenBin, light: _OpenBin, gap: int) -> _Swap | None:
    """A sequence of ``heavy`` and one of ``light`` (None: none) whose exchange comes closest to
    moving half of the gap; None where each would move nothing or all of it and more, or would not
    fit.
    """
    best = gap  # twice the distance to half of the gap; below the gap where an exchange helps
    best_swap: _Swap | None = None
    for given in heavy.members:
        cost, tokens, _ = given
        at = bisect_right(light.members, (cost - gap // 2,))
        for taken in (None, *light.members[max(at - 1, 0) : at + 1]):
            moved = cost if taken is None else cost - taken[0]
            if not 0 < moved < gap or abs(2 * moved - gap) >= best:
                continue
            longer = tokens if taken is None else tokens - taken[1]
            if -heavy.room <= longer <= light.room:
                best = abs(2 * moved - gap)
                best_swap = _Swap(given, taken)
    return best_swap


def _step_targets(total: int, costliest: list[int], num_ranks: int) -> list[int]:
    """Target load of each step: the mean of what is left, or the costliest sequence that must go
    there.
    """
    targets = []
    remaining = total
    for k, largest in enumerate(costliest):
        mean = -(-remaining // (num_ranks * (len(costliest) - k)))
        target = max(largest, mean)
        targets.append(target)
        remaining -= target * num_ranks
    return targets


def _fill(work: _Work, targets: list[int], capacity: int) -> Bins | None:
    """Each sequence, costliest first, into the bin furthest below its target that has room for it;
    None: too full.
    """
    bins: Bins = [[] for _ in targets]
    rooms = [capacity] * len(targets)
    below = [(-target, b) for b, target in enumerate(targets)]
    heapq.heapify(below)
    # Bins that had too little room for a sequence, the roomiest first, until one fits.
    full: list[tuple[int, int, int]] = []
    for index in work.order:
        size = work.sizes[index]
        while full and -full[0][0] >= size:
            _, load, b = heapq.heappop(full)
            heapq.heappush(below, (load, b))
        while below and rooms[below[0][1]] < size:
            load, b = heapq.heappop(below)
            heapq.heappush(full, (-rooms[b], load, b))
        if not below:
            return None
        load, b = below[0]
        bins[b].append(index)
        rooms[b] -= size
        heapq.heapreplace(below, (load + work.costs[index], b))
    return bins


def _best_fit(work: _Work, capacity: int) -> Bins:
    """Each sequence, longest first, into the fullest bin that takes it; a new bin where none
    does.
    """
    bins: Bins = []
    by_room: dict[int, list[int]] = {}
    # Sorted keys of by_room; at most `capacity` of them, so that insertion stays cheap.
    rooms: list[int] = []
    for index in work.order:
        size = work.sizes[index]
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


def _deal(bins: Bins, work: _Work, num_ranks: int, capacity: int) -> Schedule:
    """Bins to ranks: num_ranks bins of neighbouring load make a step; the lightest rank takes
    the heaviest.
    """
    loads = list(map(work.cost, bins))
    by_load = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    plan: Schedule = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for first in range(0, len(bins), num_ranks):
        step = _exchange([bins[b] for b in by_load[first : first + num_ranks]], work, capacity)
        step.sort(key=work.cost, reverse=True)
        ranks = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for rank, members in zip(ranks, step, strict=True):
            plan[rank].append(sorted(members))
            totals[rank] += work.cost(members)
    return plan
