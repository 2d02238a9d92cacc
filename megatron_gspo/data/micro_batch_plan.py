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

_LONGER = (
    1.02  # largest ratio of a mini-batch's step_tokens to those of a schedule that ignores homes
)


@dataclass(frozen=True)
class PackingRules:
    """How a layout packs.

    replicas: data-parallel ranks. max_tokens: of a micro-batch. micro_batch_size: its sequences, in
    place of max_tokens; or None. sequence_multiple, total_multiple: of the padded tokens of a
    sequence and of a micro-batch. count_multiple: of the number of micro-batches of a replica.
    same_length: pad all micro-batches to one length.
    """

    replicas: int
    max_tokens: int
    micro_batch_size: int | None = None
    sequence_multiple: int = 1
    total_multiple: int = 1
    count_multiple: int = 1
    same_length: bool = False

    @property
    def budget(self) -> int:
        """Most tokens that a padded micro-batch can have."""
        return self.max_tokens - self.max_tokens % self.total_multiple

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths [n] as packed."""
        return (
            -(-np.asarray(lengths, dtype=np.int64) // self.sequence_multiple)
            * self.sequence_multiple
        )


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of all replicas; each has as many.

    rows: [replica][micro-batch] -> positions of its sequences. seq_length: tokens of the longest
    one. total_multiples: [micro-batch], of its packed tokens on every replica. real_tokens,
    packed_tokens: of all, without and with padding. step_tokens: packed tokens of the longest
    micro-batch of each step, summed: replicas wait for each other.
    """

    rows: Schedule
    seq_length: int
    sequence_multiple: int
    total_multiples: tuple[int, ...]
    real_tokens: int
    packed_tokens: int
    step_tokens: int

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
        rows = [[[positions[i] for i in batch] for batch in mine] for mine in self.rows]
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
    totals = [
        [max(padded_length(int(padded[batch].sum()), multiple), multiple) for batch in mine]
        for mine in rows
    ]
    longest = max(max(mine) for mine in totals)
    if rules.same_length:
        totals = [[longest] * len(mine) for mine in totals]
    return MicroBatchPlan(
        rows,
        longest,
        rules.sequence_multiple,
        (longest if rules.same_length else multiple,) * len(rows[0]),
        int(np.sum(lengths)),
        sum(map(sum, totals)),
        sum(map(max, zip(*totals, strict=True))),
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

    epochs: [pass][mini-batch] -> positions; every pass has each sequence once. homes: [n] replica
    that has the sequence now; None: all replicas have all. A sequence stays at home unless one of
    its mini-batches would be above its share of the load there: longest first, so that short ones
    move, to the replica that has most room. With one pass, a mini-batch whose steps would be more
    than 2 % longer than with a schedule that ignores homes gets that schedule.
    """
    replica = np.zeros(len(lengths), dtype=np.int32)
    if homes is None and len(epochs) == 1:
        free_plans = [plan_micro_batches(lengths[rows], rules) for rows in epochs[0]]
        for rows, plan in zip(epochs[0], free_plans, strict=True):
            replica[rows] = plan.replica_of()
        return replica, [free_plans]
    if rules.replicas > 1:
        sizes = (
            rules.padded(lengths)
            if rules.micro_batch_size is None
            else np.ones(len(lengths), dtype=np.int64)
        )
        replica = _near_home(sizes, epochs, rules.replicas, homes)
    plans = [
        [plan_micro_batches(lengths[rows], rules, replica[rows]) for rows in batches]
        for batches in epochs
    ]
    for number, rows in enumerate(epochs[0] if len(epochs) == 1 < rules.replicas else []):
        free = plan_micro_batches(lengths[rows], rules)
        if plans[0][number].step_tokens > _LONGER * free.step_tokens:
            plans[0][number], replica[rows] = free, free.replica_of()
    return replica, plans


def _near_home(
    sizes: np.ndarray, epochs: Sequence[Sequence[Rows]], replicas: int, homes: np.ndarray | None
) -> np.ndarray:
    """[n] int32: each sequence's home where all of its mini-batches have room for it there,
    else another replica.
    """
    # Mini-batch of each sequence in each pass.
    member = np.empty((len(epochs), len(sizes)), dtype=np.int64)
    for epoch, batches in enumerate(epochs):
        for number, rows in enumerate(batches):
            member[epoch, rows] = number
    count = int(member.max(initial=0)) + 1
    passes = np.arange(len(epochs))
    totals = np.array([np.bincount(of, weights=sizes, minlength=count) for of in member])
    room = np.repeat(np.ceil(totals / replicas).astype(np.int64)[:, :, None], replicas, axis=2)
    replica = np.zeros(len(sizes), dtype=np.int32) if homes is None else homes.astype(np.int32)
    leaving = np.argsort(-sizes, kind="stable").tolist()
    if homes is not None:
        leaving = _take_at_home(
            sizes.tolist(), leaving, (passes[:, None] * count + member) * replicas + replica, room
        )
    for i in leaving:
        left = room[passes, member[:, i]]
        replica[i] = np.lexsort((-left.sum(0), -left.min(0)))[0]
        room[passes, member[:, i], replica[i]] -= sizes[i]
    return replica


def _take_at_home(
    sizes: list[int], order: list[int], places: np.ndarray, room: np.ndarray
) -> list[int]:
    """Take the sequences' sizes, in this order, from the room at home while there is enough; those
    without it.

    places: [passes, n] index into the flat room of each pass. By lists: numpy costs more for a
    number at a time.
    """
    left = room.reshape(-1).tolist()
    missing = []
    of = places.T.tolist()
    for i in order:
        if all(left[place] >= sizes[i] for place in of[i]):
            for place in of[i]:
                left[place] -= sizes[i]
        else:
            missing.append(i)
    room.reshape(-1)[:] = left
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
    mine = [np.flatnonzero(replica == r) for r in range(rules.replicas)]
    alone = [_alone(padded[rows], rules, 1) for rows in mine]
    count = max(map(len, alone))
    plans = [
        bins if len(bins) == count else _alone(padded[rows], rules, count)
        for rows, bins in zip(mine, alone, strict=True)
    ]
    # Bins that could not be levelled: empty ones make up the number.
    if len({len(plan) for plan in plans}) > 1:
        count = max(map(len, plans))
        plans = [plan + [[] for _ in range(count - len(plan))] for plan in plans]
    return [
        [rows[batch].tolist() for batch in plan] for rows, plan in zip(mine, plans, strict=True)
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
