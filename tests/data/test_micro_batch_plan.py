"""Plans of micro-batches: complete, level, the same for one replica as without an assignment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.data.micro_batch_plan import PackingRules, _fixed, assign_replicas, plan_micro_batches
from megatron_gspo.data.schedule import schedule


def epochs_of(count: int, size: int, passes: int, seed: int = 0) -> list[list[list[int]]]:
    orders = [np.random.default_rng([seed, epoch]).permutation(count) for epoch in range(passes)]
    return [[order[start : start + size].tolist() for start in range(0, count, size)] for order in orders]


RULES = st.builds(
    PackingRules,
    replicas=st.integers(1, 5),
    max_tokens=st.integers(60, 200),
    micro_batch_size=st.none() | st.integers(1, 5),
    sequence_multiple=st.sampled_from([1, 4]),
    total_multiple=st.sampled_from([4, 8]),
    count_multiple=st.integers(1, 3),
    same_length=st.booleans(),
)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(np.array)


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTHS, rules=RULES, size=st.integers(1, 30), passes=st.integers(1, 3))
def test_every_sequence_is_once_on_its_replica(lengths, rules, size, passes):
    epochs = epochs_of(len(lengths), size, passes)
    replica = assign_replicas(lengths, epochs, rules)
    assert replica.shape == (len(lengths),) and 0 <= replica.min() and replica.max() < rules.replicas
    for rows in [batch for batches in epochs for batch in batches] + [range(len(lengths))]:
        rows = np.array(rows)
        plan = plan_micro_batches(lengths[rows], rules, replica[rows])
        assert len(plan.rows) == rules.replicas
        assert len({len(mine) for mine in plan.rows}) == 1 and len(plan.rows[0]) % rules.count_multiple == 0
        for owner, mine in enumerate(plan.rows):
            placed = sorted(i for batch in mine for i in batch)
            assert placed == np.flatnonzero(replica[rows] == owner).tolist()
        batches = [batch for mine in plan.rows for batch in mine]
        if rules.micro_batch_size is None:
            assert max(rules.padded(lengths[rows])[batch].sum() for batch in batches) <= rules.max_tokens
        else:
            assert max(map(len, batches)) <= rules.micro_batch_size
        assert plan.real_tokens == lengths[rows].sum() <= plan.packed_tokens
        assert np.array_equal(plan.replica_of(), replica[rows])


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, rules=RULES)
def test_one_replica_packs_as_without_an_assignment(lengths, rules):
    rules = PackingRules(1, rules.max_tokens, rules.micro_batch_size, count_multiple=rules.count_multiple)
    assert plan_micro_batches(lengths, rules, np.zeros(len(lengths), dtype=int)) == plan_micro_batches(lengths, rules)


@pytest.mark.parametrize(("passes", "allowed"), [(1, 0.01), (2, 0.03), (4, 0.1)])
def test_every_mini_batch_is_level(passes, allowed):
    """Response lengths as they are met: log-normal, cut off."""
    draws = np.random.default_rng(3)
    lengths = np.minimum(draws.lognormal(7.5, 0.8, 1024), 8192).astype(int) + 200
    rules, epochs = PackingRules(8, 16_384), epochs_of(1024, 256, passes)
    replica = assign_replicas(lengths, epochs, rules)
    for rows in [np.array(batch) for batches in epochs for batch in batches]:
        loads = np.bincount(replica[rows], weights=lengths[rows], minlength=8)
        assert loads.max() / loads.mean() - 1 <= allowed
        plan = plan_micro_batches(lengths[rows], rules, replica[rows])
        least = -(-int(lengths[rows].sum()) // (8 * 16_384))
        assert len(plan.rows[0]) <= least + 1, "hardly more micro-batches than the tokens need"


def test_one_pass_has_the_schedule_of_its_mini_batches():
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    epochs, rules = epochs_of(40, 16, 1), PackingRules(3, 100)
    replica = assign_replicas(lengths, epochs, rules)
    for rows in epochs[0]:
        plan = schedule(lengths[rows], num_ranks=3, max_tokens=100)
        for owner, mine in enumerate(plan):
            assert {owner} == {int(replica[rows[i]]) for batch in mine for i in batch} or not any(mine)


def test_a_sequence_that_fits_nowhere_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 80 tokens but max_tokens is 64"):
        plan_micro_batches(np.array([3, 80]), PackingRules(2, 64), np.array([0, 1]))


@settings(deadline=None, max_examples=200)
@given(count=st.integers(0, 40), ranks=st.integers(1, 5), size=st.integers(1, 6), step=st.integers(1, 3))
def test_a_fixed_size_deals_every_sample_once(count, ranks, size, step):
    plan = _fixed(count, ranks, size, step)
    assert sorted(i for rank in plan for rows in rank for i in rows) == list(range(count))
    lengths = {len(rank) for rank in plan}
    assert len(plan) == ranks and len(lengths) == 1 and lengths.pop() % step == 0 and len(plan[0]) >= 1
    rows = [rows for rank in plan for rows in rank]
    assert all(len(row) <= size for row in rows)
    assert sum(0 < len(row) < size for row in rows) <= 1, "at most the last one isn't full"
    # no more micro-batches than the most loaded rank needs, up to the multiple
    assert len(plan[0]) < max(-(-count // (size * ranks)), 1) + step
