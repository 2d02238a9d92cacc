"""Which data-parallel replica trains which sequence, and in which micro-batch: functions of lengths
and homes alone.

A rollout batch is planned once: each sequence gets a replica, on which it stays, and each
mini-batch its micro-batches. Every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from megatron_gspo.data.schedule import Schedule, padded_length, schedule, step_targets

Positions = Sequence[int]
"""Of sequences in a batch."""

# Largest ratio of a mini-batch's step_cost to that of a schedule that ignores homes.
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

    micro_batches: Schedule
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

    step_cost: float
    """Cost of the costliest micro-batch of each step, summed: replicas wait for each other. A token
    of padding costs as much as the mean token."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each replica."""
        return len(self.total_multiples)

    def replica_of(self) -> np.ndarray:
        """[n]: the replica of each sequence."""
        counts = [sum(map(len, of_replica)) for of_replica in self.micro_batches]
        owners = np.empty(sum(counts), dtype=np.int32)
        for replica, of_replica in enumerate(self.micro_batches):
            for positions in of_replica:
                owners[positions] = replica
        return owners

    def within(self, positions: Positions) -> MicroBatchPlan:
        """The same plan in a larger batch, where sequence i is at `positions[i]`."""
        micro_batches = [
            [[positions[i] for i in micro_batch] for micro_batch in of_replica]
            for of_replica in self.micro_batches
        ]
        return replace(self, micro_batches=micro_batches)


def plan_micro_batches(
    lengths: np.ndarray,
    rules: PackingRules,
    replica: np.ndarray | None = None,
    *,
    costs: np.ndarray | None = None,
) -> MicroBatchPlan:
    """The micro-batches of sequences of `lengths` [n] tokens.

    replica: [n], where the sequences are; None: chosen here, so that the replicas' costs are level.
    costs: [n] integers from 1, what a sequence costs in any unit; None: its padded tokens.
    Raises ValueError for a sequence that is longer than a micro-batch.
    """
    padded = rules.padded(lengths)
    costs = padded if costs is None else costs
    if replica is None:
        micro_batches = _free(padded, costs, rules)
    else:
        micro_batches = _assigned(padded, costs, rules, replica)
    multiple = rules.total_multiple
    # By replica and micro-batch; an empty one has the tokens of the dummy.
    tokens = _sums(padded, micro_batches)
    totals = np.maximum(-(-tokens // multiple), 1) * multiple
    longest = int(totals.max())
    if rules.same_length:
        totals[:] = longest
        multiple = longest
    padding_cost = (totals - tokens) * (costs.sum() / max(padded.sum(), 1))
    step_costs = (_sums(costs, micro_batches) + padding_cost).max(axis=0)
    return MicroBatchPlan(
        micro_batches=micro_batches,
        seq_length=longest,
        sequence_multiple=rules.sequence_multiple,
        total_multiples=(multiple,) * len(micro_batches[0]),
        real_tokens=int(np.sum(lengths)),
        packed_tokens=int(totals.sum()),
        step_cost=float(step_costs.sum()),
    )


def joined(plans: Sequence[MicroBatchPlan]) -> MicroBatchPlan:
    """The micro-batches of plans that name positions in the same batch, plan after plan."""
    replicas = range(len(plans[0].micro_batches))
    return MicroBatchPlan(
        micro_batches=[
            [micro_batch for plan in plans for micro_batch in plan.micro_batches[replica]]
            for replica in replicas
        ],
        seq_length=max(plan.seq_length for plan in plans),
        sequence_multiple=plans[0].sequence_multiple,
        total_multiples=tuple(multiple for plan in plans for multiple in plan.total_multiples),
        real_tokens=sum(plan.real_tokens for plan in plans),
        packed_tokens=sum(plan.packed_tokens for plan in plans),
        step_cost=sum(plan.step_cost for plan in plans),
    )


def plan_passes(
    lengths: np.ndarray,
    epochs: Sequence[Sequence[Positions]],
    rules: PackingRules,
    homes: np.ndarray | None,
    *,
    costs: np.ndarray | None = None,
) -> tuple[np.ndarray, list[list[MicroBatchPlan]]]:
    """[n] int32: the replica that trains each sequence, and [pass][mini-batch] the micro-batches.
    Every mini-batch is level over the replicas.

    A sequence stays at home unless one of its mini-batches would be above its share of the cost
    there: costliest first, so that cheap ones move, to the replica that has most room. With one
    pass, a mini-batch whose steps would cost 2 % more than with a schedule that ignores homes gets
    that schedule; with several, homes are ignored where all steps would cost 2 % more.

    Args:
        lengths: [n] tokens of each sequence.
        epochs: [pass][mini-batch] -> positions; every pass has each sequence once.
        homes: [n] replica that has the sequence now; None: all replicas have all.
        costs: [n] as in `plan_micro_batches`.
    """
    if costs is None:
        costs = rules.padded(lengths)
    replica = np.zeros(len(lengths), dtype=np.int32)
    if homes is None and len(epochs) == 1:
        free_plans = [
            plan_micro_batches(lengths[positions], rules, costs=costs[positions])
            for positions in epochs[0]
        ]
        for positions, plan in zip(epochs[0], free_plans, strict=True):
            replica[positions] = plan.replica_of()
        return replica, [free_plans]
    if rules.replicas > 1:
        loads = _shared_loads(rules.padded(lengths), costs, epochs[0], rules)
        replica = _near_home(loads, epochs, rules.replicas, homes)
    plans = _plans(lengths, epochs, rules, replica, costs)
    if rules.replicas == 1:
        return replica, plans
    if len(epochs) > 1:
        # No replicas wait for each other less than those of level costs.
        level = len(epochs) * costs.sum() / rules.replicas
        if homes is not None and _step_cost(plans) > _LONGER * level:
            anywhere = _near_home(loads, epochs, rules.replicas, None)
            level_plans = _plans(lengths, epochs, rules, anywhere, costs)
            if _step_cost(plans) > _LONGER * _step_cost(level_plans):
                return anywhere, level_plans
        return replica, plans
    for number, positions in enumerate(epochs[0]):
        free_plan = plan_micro_batches(lengths[positions], rules, costs=costs[positions])
        if plans[0][number].step_cost > _LONGER * free_plan.step_cost:
            plans[0][number] = free_plan
            replica[positions] = free_plan.replica_of()
    return replica, plans


def _plans(
    lengths: np.ndarray,
    epochs: Sequence[Sequence[Positions]],
    rules: PackingRules,
    replica: np.ndarray,
    costs: np.ndarray,
) -> list[list[MicroBatchPlan]]:
    """[pass][mini-batch] the micro-batches of sequences whose replicas are chosen."""
    return [
        [
            plan_micro_batches(
                lengths[positions], rules, replica[positions], costs=costs[positions]
            )
            for positions in batches
        ]
        for batches in epochs
    ]


def _step_cost(plans: Sequence[Sequence[MicroBatchPlan]]) -> float:
    return sum(plan.step_cost for of_pass in plans for plan in of_pass)


def _shared_loads(
    padded: np.ndarray, costs: np.ndarray, mini_batches: Sequence[Positions], rules: PackingRules
) -> list[np.ndarray]:
    """What is shared among the replicas: arrays [n] int64 of each sequence's cost and tokens, or
    with a fixed micro-batch size its number, 1.

    Of a cost, no more counts than that of a mean micro-batch. The replicas wait for a sequence that
    costs more, wherever it is, and what the others could do meanwhile may exceed their tokens.
    """
    if rules.micro_batch_size is not None:
        return [np.ones(len(padded), dtype=np.int64)]
    of_a_step = rules.replicas * rules.budget
    steps = sum(-(-int(padded[positions].sum()) // of_a_step) for positions in mini_batches)
    mean = int(costs.sum()) // max(steps * rules.replicas, 1)
    return [np.minimum(costs, max(mean, 1)), padded]


def _near_home(
    loads: Sequence[np.ndarray],
    epochs: Sequence[Sequence[Positions]],
    replicas: int,
    homes: np.ndarray | None,
) -> np.ndarray:
    """[n] int32: each sequence's home where all of its mini-batches have room for its loads there,
    else another replica. Those with the largest first load choose first, in a tie the second decides.
    """
    # [loads * passes, n]: the load and the mini-batch of each sequence.
    values = np.repeat(loads, len(epochs), axis=0)
    mini_batch = np.empty_like(values)
    for row in range(len(values)):
        for number, positions in enumerate(epochs[row % len(epochs)]):
            mini_batch[row, positions] = number
    rows = np.arange(len(values))
    totals = np.zeros((len(values), int(mini_batch.max(initial=0)) + 1), dtype=np.int64)
    np.add.at(totals, (rows[:, None], mini_batch), values)
    shares = -(-totals // replicas)
    # [loads * passes, mini-batches, replicas]: what a replica may still take of a mini-batch.
    room = np.repeat(shares[:, :, None], replicas, axis=2)
    count = len(loads[0])
    replica = np.zeros(count, dtype=np.int32) if homes is None else homes.astype(np.int32)
    order = np.lexsort([-load for load in reversed(loads)])
    # Placed last, those that fit nowhere would meet replicas that are full.
    fits_nowhere = (values > shares[rows[:, None], mini_batch]).any(axis=0)[order]
    leaving = order[~fits_nowhere].tolist()
    # Of each sequence, where its mini-batches are in [loads * passes * mini-batches, replicas].
    where = (rows[:, None] * totals.shape[1] + mini_batch).T
    room_of = room.reshape(-1, replicas)
    share_of = shares.reshape(-1, 1)

    def place(i: int) -> None:
        """Where most room is left, at home in a tie."""
        share_left = room_of[where[i]] / share_of[where[i]]
        least = share_left.min(0)
        best = np.flatnonzero(least == least.max())
        if len(best) > 1:
            left = share_left.sum(0)[best]
            best = best[left == left.max()]
        if replica[i] not in best:
            replica[i] = best[0]
        room_of[where[i], replica[i]] -= values[:, i]

    for i in order[fits_nowhere].tolist():
        place(i)
    if homes is not None:
        at_home = where.T * replicas + replica
        leaving = _take_at_home(values.T.tolist(), leaving, at_home, room)
    for i in leaving:
        place(i)
    return replica


def _take_at_home(
    loads: list[list[int]], order: list[int], at_home: np.ndarray, room: np.ndarray
) -> list[int]:
    """Take the sequences' loads, in this order, from the room at home while there is enough;
    returns those without it.

    loads: [n][loads * passes]. at_home: [loads * passes, n] where a sequence's room at home is in
    the flattened room. The work is on lists, since numpy costs more for a number at a time.
    """
    flat_room = room.reshape(-1).tolist()
    missing = []
    indices_of = at_home.T.tolist()
    for i in order:
        taken = list(zip(indices_of[i], loads[i], strict=True))
        if all(flat_room[index] >= load for index, load in taken):
            for index, load in taken:
                flat_room[index] -= load
        else:
            missing.append(i)
    room.reshape(-1)[:] = flat_room
    return missing


def _free(padded: np.ndarray, costs: np.ndarray, rules: PackingRules) -> Schedule:
    if rules.micro_batch_size is None:
        return schedule(
            padded.tolist(),
            num_ranks=rules.replicas,
            max_tokens=rules.budget,
            costs=costs.tolist(),
            multiple_of=rules.count_multiple,
        )
    return _fixed(len(padded), rules.replicas, rules.micro_batch_size, rules.count_multiple)


def _assigned(
    padded: np.ndarray, costs: np.ndarray, rules: PackingRules, replica: np.ndarray
) -> Schedule:
    """Each replica packs its own, all into as many micro-batches as the one that needs most, and
    each with the same target for a step."""
    if rules.micro_batch_size is None and padded.size and padded.max() > rules.budget:
        _free(padded, costs, rules)  # raises, with the position among all
    positions_of = [np.flatnonzero(replica == r) for r in range(rules.replicas)]
    if rules.micro_batch_size is not None:
        size = rules.micro_batch_size
        plans = [
            _fixed(len(positions), 1, size, rules.count_multiple)[0] for positions in positions_of
        ]
    else:
        fewest = max(int(-(-padded[positions].sum() // rules.budget)) for positions in positions_of)
        count = padded_length(max(fewest, 1), rules.count_multiple)
        targets = step_targets([costs[positions] for positions in positions_of], count)
        plans = [
            schedule(
                padded[positions].tolist(),
                num_ranks=1,
                max_tokens=rules.budget,
                costs=costs[positions].tolist(),
                multiple_of=rules.count_multiple,
                targets=targets,
            )[0]
            for positions in positions_of
        ]
    # Empty ones make up the number where some could not be levelled.
    count = max(map(len, plans))
    plans = [plan + [[] for _ in range(count - len(plan))] for plan in plans]
    return [
        [positions[micro_batch].tolist() for micro_batch in plan]
        for positions, plan in zip(positions_of, plans, strict=True)
    ]


def _sums(values: np.ndarray, micro_batches: Schedule) -> np.ndarray:
    """[replica, micro-batch] int64: the sum of the sequences' values."""
    every = [micro_batch for of_replica in micro_batches for micro_batch in of_replica]
    ends = np.concatenate([[0], np.cumsum(list(map(len, every)))])
    positions = np.fromiter(chain.from_iterable(every), dtype=np.int64, count=ends[-1])
    running = np.concatenate([[0], np.cumsum(values[positions])])
    return (running[ends[1:]] - running[ends[:-1]]).reshape(len(micro_batches), -1)


def _fixed(count: int, num_ranks: int, size: int, multiple_of: int) -> Schedule:
    """``size`` sequences per micro-batch, assigned to ranks round-robin; empty micro-batches
    come last.
    """
    micro_batches = [
        list(range(start, min(start + size, count))) for start in range(0, count, size)
    ]
    per_rank = padded_length(max(-(-len(micro_batches) // num_ranks), 1), multiple_of)
    micro_batches += [[] for _ in range(per_rank * num_ranks - len(micro_batches))]
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]
