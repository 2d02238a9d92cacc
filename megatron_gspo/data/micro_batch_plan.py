"""Which data-parallel replica trains which sequence, and in which micro-batch: functions of lengths
and homes alone.

A rollout batch is planned once: each sequence gets a replica, on which it stays, and each
mini-batch its micro-batches. Every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_gspo.data.schedule import Schedule, padded_length, schedule

Rows = Sequence[int]

# Largest ratio of a mini-batch's step_tokens to those of a schedule that ignores homes.
_LONGER = 1.02


@dataclass(frozen=True)
class PackingRules:
    """How a layout packs."""

    replicas: int
    """Number of data-parallel ranks."""

    max_tokens: int
    """Most tokens of a micro-batch."""

    micro_batch_size: int | None = None
    """Sequences of a micro-batch, in place of max_tokens; or None."""

    sequence_multiple: int = 1
    """The padded tokens of a sequence are a multiple of this."""

    total_multiple: int = 1
    """The padded tokens of a micro-batch are a multiple of this."""

    count_multiple: int = 1
    """The number of micro-batches of a replica is a multiple of this."""

    same_length: bool = False
    """Pad all micro-batches to one length."""

    @property
    def budget(self) -> int:
        """Most tokens that a padded micro-batch can have."""
        return self.max_tokens - self.max_tokens % self.total_multiple

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths [n] as packed."""
        lengths = np.asarray(lengths, dtype=np.int64)
        multiples = -(-lengths // self.sequence_multiple)
        return multiples * self.sequence_multiple


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of all replicas; each has as many."""

    rows: Schedule
    """[replica][micro-batch] -> positions of its sequences."""

    seq_length: int
    """Tokens of the longest micro-batch."""

    sequence_multiple: int
    total_multiples: tuple[int, ...]
    """[micro-batch], a divisor of its packed tokens on every replica."""

    real_tokens: int
    """Tokens of all micro-batches without padding."""

    packed_tokens: int
    """Tokens of all micro-batches with padding."""

    step_tokens: int
    """Packed tokens of the longest micro-batch of each step, summed: replicas wait for each
    other."""

    def replica_of(self) -> np.ndarray:
        """[n]: the replica of each sequence."""
        counts = [sum(map(len, batches)) for batches in self.rows]
        owners = np.empty(sum(counts), dtype=np.int32)
        for replica, batches in enumerate(self.rows):
            for positions in batches:
                owners[positions] = replica
        return owners

    def within(self, positions: Rows) -> MicroBatchPlan:
        """The same micro-batches, naming sequence i by its position `positions[i]` in a larger
        batch.
        """
        rows = [
            [[positions[i] for i in micro_batch] for micro_batch in micro_batches]
            for micro_batches in self.rows
        ]
        return replace(self, rows=rows)


def plan_micro_batches(
    lengths: np.ndarray, rules: PackingRules, replica: np.ndarray | None = None
) -> MicroBatchPlan:
    """The micro-batches of sequences of `lengths` [n] tokens.

    replica: [n], where the sequences are; None: chosen here, so that the replicas' loads are level.
    Raises ValueError for a sequence that is longer than a micro-batch.
    """
    padded = rules.padded(lengths)
    rows = _free(padded, rules) if replica is None else _assigned(padded, rules, replica)
    multiple = rules.total_multiple
    # Packed tokens by replica and micro-batch; an empty one has the dummy's.
    totals = np.array(
        [
            [
                max(padded_length(int(padded[micro_batch].sum()), multiple), multiple)
                for micro_batch in micro_batches
            ]
            for micro_batches in rows
        ]
    )
    longest = int(totals.max())
    if rules.same_length:
        totals[:] = longest
        multiple = longest
    return MicroBatchPlan(
        rows=rows,
        seq_length=longest,
        sequence_multiple=rules.sequence_multiple,
        total_multiples=(multiple,) * len(rows[0]),
        real_tokens=int(np.sum(lengths)),
        packed_tokens=int(totals.sum()),
        step_tokens=int(totals.max(axis=0).sum()),
    )


def joined(plans: Sequence[MicroBatchPlan]) -> MicroBatchPlan:
    """The micro-batches of plans that name positions in the same batch, plan after plan."""
    replicas = range(len(plans[0].rows))
    return MicroBatchPlan(
        rows=[[batch for plan in plans for batch in plan.rows[replica]] for replica in replicas],
        seq_length=max(plan.seq_length for plan in plans),
        sequence_multiple=plans[0].sequence_multiple,
        total_multiples=tuple(multiple for plan in plans for multiple in plan.total_multiples),
        real_tokens=sum(plan.real_tokens for plan in plans),
        packed_tokens=sum(plan.packed_tokens for plan in plans),
        step_tokens=sum(plan.step_tokens for plan in plans),
    )


def plan_passes(
    lengths: np.ndarray,
    epochs: Sequence[Sequence[Rows]],
    rules: PackingRules,
    homes: np.ndarray | None,
) -> tuple[np.ndarray, list[list[MicroBatchPlan]]]:
    """[n] int32: the replica that trains each sequence, and [pass][mini-batch] the micro-batches.
    Every mini-batch is level over the replicas.

    A sequence stays at home unless one of its mini-batches would be above its share of the load
    there: longest first, so that short ones move, to the replica that has most room. With one pass,
    a mini-batch whose steps would be more than 2 % longer than with a schedule that ignores homes
    gets that schedule.

    Args:
        lengths: [n] tokens of each sequence.
        epochs: [pass][mini-batch] -> positions; every pass has each sequence once.
        homes: [n] replica that has the sequence now; None: all replicas have all.
    """
    replica = np.zeros(len(lengths), dtype=np.int32)
    if homes is None and len(epochs) == 1:
        free_plans = [plan_micro_batches(lengths[rows], rules) for rows in epochs[0]]
        for rows, plan in zip(epochs[0], free_plans, strict=True):
            replica[rows] = plan.replica_of()
        return replica, [free_plans]
    if rules.replicas > 1:
        sizes = rules.padded(lengths)
        if rules.micro_batch_size is not None:
            sizes = np.ones(len(lengths), dtype=np.int64)
        replica = _near_home(sizes, epochs, rules.replicas, homes)
    plans = [
        [plan_micro_batches(lengths[rows], rules, replica[rows]) for rows in batches]
        for batches in epochs
    ]
    if len(epochs) > 1 or rules.replicas == 1:
        return replica, plans
    for number, rows in enumerate(epochs[0]):
        free_plan = plan_micro_batches(lengths[rows], rules)
        if plans[0][number].step_tokens > _LONGER * free_plan.step_tokens:
            plans[0][number] = free_plan
            replica[rows] = free_plan.replica_of()
    return replica, plans


def _near_home(
    sizes: np.ndarray, epochs: Sequence[Sequence[Rows]], replicas: int, homes: np.ndarray | None
) -> np.ndarray:
    """[n] int32: each sequence's home where all of its mini-batches have room for it there,
    else another replica.
    """
    # [passes, n]: the mini-batch of each sequence in each pass.
    mini_batch = np.empty((len(epochs), len(sizes)), dtype=np.int64)
    for epoch, batches in enumerate(epochs):
        for number, rows in enumerate(batches):
            mini_batch[epoch, rows] = number
    count = int(mini_batch.max(initial=0)) + 1
    passes = np.arange(len(epochs))
    totals = np.array(
        [np.bincount(numbers, weights=sizes, minlength=count) for numbers in mini_batch]
    )
    # [passes, mini-batches, replicas]: what a replica may still take of a mini-batch.
    shares = np.ceil(totals / replicas).astype(np.int64)
    room = np.repeat(shares[:, :, None], replicas, axis=2)
    replica = np.zeros(len(sizes), dtype=np.int32) if homes is None else homes.astype(np.int32)
    leaving = np.argsort(-sizes, kind="stable").tolist()
    if homes is not None:
        at_home = (passes[:, None] * count + mini_batch) * replicas + replica
        leaving = _take_at_home(sizes.tolist(), leaving, at_home, room)
    for i in leaving:
        room_of_replicas = room[passes, mini_batch[:, i]]
        most_room_first = np.lexsort((-room_of_replicas.sum(0), -room_of_replicas.min(0)))
        replica[i] = most_room_first[0]
        room[passes, mini_batch[:, i], replica[i]] -= sizes[i]
    return replica


def _take_at_home(
    sizes: list[int], order: list[int], at_home: np.ndarray, room: np.ndarray
) -> list[int]:
    """Take the sequences' sizes, in this order, from the room at home while there is enough;
    returns those without it.

    at_home: [passes, n] where a sequence's room at home is in the flattened room. The work is on
    lists, since numpy costs more for a number at a time.
    """
    flat_room = room.reshape(-1).tolist()
    missing = []
    indices_of = at_home.T.tolist()
    for i in order:
        if all(flat_room[index] >= sizes[i] for index in indices_of[i]):
            for index in indices_of[i]:
                flat_room[index] -= sizes[i]
        else:
            missing.append(i)
    room.reshape(-1)[:] = flat_room
    return missing


def _free(padded: np.ndarray, rules: PackingRules) -> Schedule:
    if rules.micro_batch_size is None:
        return schedule(
            padded.tolist(),
            num_ranks=rules.replicas,
            max_tokens=rules.budget,
            multiple_of=rules.count_multiple,
        )
    return _fixed(len(padded), rules.replicas, rules.micro_batch_size, rules.count_multiple)


def _assigned(padded: np.ndarray, rules: PackingRules, replica: np.ndarray) -> Schedule:
    """Each replica packs its own, all into as many micro-batches as the one that needs most."""
    if rules.micro_batch_size is None and padded.size and padded.max() > rules.budget:
        _free(padded, rules)  # raises, with the position among all
    rows_of = [np.flatnonzero(replica == r) for r in range(rules.replicas)]
    alone = [_alone(padded[rows], rules, 1) for rows in rows_of]
    count = max(map(len, alone))
    plans = [
        bins if len(bins) == count else _alone(padded[rows], rules, count)
        for rows, bins in zip(rows_of, alone, strict=True)
    ]
    # Bins that could not be levelled: empty ones make up the number.
    if len({len(plan) for plan in plans}) > 1:
        count = max(map(len, plans))
        plans = [plan + [[] for _ in range(count - len(plan))] for plan in plans]
    return [
        [rows[micro_batch].tolist() for micro_batch in plan]
        for rows, plan in zip(rows_of, plans, strict=True)
    ]


def _alone(padded: np.ndarray, rules: PackingRules, at_least: int) -> list[list[int]]:
    if rules.micro_batch_size is not None:
        [bins] = _fixed(len(padded), 1, rules.micro_batch_size, rules.count_multiple)
        return bins + [[] for _ in range(at_least - len(bins))]
    [bins] = schedule(
        padded.tolist(),
        num_ranks=1,
        max_tokens=rules.budget,
        multiple_of=rules.count_multiple,
        at_least=at_least,
    )
    return bins


def _fixed(count: int, num_ranks: int, size: int, multiple_of: int) -> Schedule:
    """``size`` sequences per micro-batch, assigned to ranks round-robin; empty micro-batches
    come last.
    """
    rows = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    per_rank = padded_length(max(-(-len(rows) // num_ranks), 1), multiple_of)
    rows += [[] for _ in range(per_rank * num_ranks - len(rows))]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]
