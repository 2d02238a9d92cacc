import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.data.schedule import padded_length, schedule


def loads(plan, lengths):
    return [[sum(lengths[i] for i in indices) for indices in rank] for rank in plan]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    num_ranks=st.integers(1, 5),
    slack=st.integers(0, 60),
    multiple_of=st.integers(1, 3),
)
def test_invariants(lengths, num_ranks, slack, multiple_of):
    max_tokens = max(lengths, default=1) + slack
    arguments = {"num_ranks": num_ranks, "max_tokens": max_tokens, "multiple_of": multiple_of}
    plan = schedule(lengths, **arguments)
    assert sorted(i for rank in plan for indices in rank for i in indices) == list(
        range(len(lengths))
    )
    assert len(plan) == num_ranks
    (count,) = {len(rank) for rank in plan}
    assert count >= 1 and count % multiple_of == 0
    assert max(max(rank) for rank in loads(plan, lengths)) <= max_tokens
    assert all(indices == sorted(indices) for rank in plan for indices in rank)
    assert plan == schedule(np.array(lengths, dtype=np.int64), **arguments)
    # first-fit-type packing leaves at most one bin half empty, which bounds the count
    bins = max(2 * math.ceil(sum(lengths) / max_tokens), 1)
    step = num_ranks * multiple_of
    assert count * num_ranks <= math.ceil(bins / step) * step


def totals(plan, values):
    return np.array([[sum(values[i] for i in indices) for indices in rank] for rank in plan])


def waiting(plan, costs):
    """The time that ranks wait for the slowest, relative to the time that they work: if they wait
    after every micro-batch, and if they wait at the end alone.
    """
    of_steps = totals(plan, costs)
    mean = of_steps.sum() / len(plan)
    return of_steps.max(axis=0).sum() / mean - 1, of_steps.sum(axis=1).max() / mean - 1


@settings(max_examples=300, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 1000)), max_size=60),
    num_ranks=st.integers(1, 5),
    slack=st.integers(0, 60),
    multiple_of=st.integers(1, 3),
    targets=st.lists(st.integers(0, 3000), max_size=4).map(lambda t: sorted(t, reverse=True)),
)
def test_invariants_with_costs(sequences, num_ranks, slack, multiple_of, targets):
    """Any costs, also those that do not grow with the length."""
    lengths = [length for length, _ in sequences]
    costs = [cost for _, cost in sequences]
    max_tokens = max(lengths, default=1) + slack
    arguments = {
        "num_ranks": num_ranks,
        "max_tokens": max_tokens,
        "multiple_of": multiple_of,
        "targets": targets,
    }
    plan = schedule(lengths, costs=costs, **arguments)
    placed = [i for rank in plan for indices in rank for i in indices]
    assert sorted(placed) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    (count,) = {len(rank) for rank in plan}
    assert count >= max(len(targets), 1) and count % multiple_of == 0
    assert totals(plan, lengths).max() <= max_tokens
    assert all(indices == sorted(indices) for rank in plan for indices in rank)
    assert plan == schedule(np.array(lengths, dtype=int), costs=np.array(costs, int), **arguments)
    # As many micro-batches as without costs, within what two ways to fill full bins differ by.
    bins = max(2 * math.ceil(sum(lengths) / max_tokens), len(targets) * num_ranks, 1)
    step = num_ranks * multiple_of
    assert count * num_ranks <= math.ceil(bins / step) * step


def test_costs_are_levelled_within_the_budget_of_tokens():
    # By tokens 6 meets 6. By cost 6 (36) meets the four of 3 (36), which together fit.
    lengths = [6, 3, 3, 3, 3]
    costs = [36, 9, 9, 9, 9]
    assert sorted(schedule(lengths, num_ranks=2, max_tokens=12, costs=costs)) == [
        [[0]],
        [[1, 2, 3, 4]],
    ]
    # They do not fit in 11 tokens: the first takes one of them, the cheapest.
    costs = [36, 9, 8, 9, 9]
    plan = schedule(lengths, num_ranks=2, max_tokens=11, costs=costs)
    assert sorted(plan) == [[[0, 2]], [[1, 3, 4]]]


def qwen3_30b_flops(lengths):
    """A thousand FLOPs of Qwen3-30B-A3B's layers: 2.73 billion weights a token, 48 layers of 32
    heads of 128.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    return (2 * 2_730_000 * lengths + 2 * 48 * 32 * 256 * lengths * (lengths + 1) // 2000).tolist()


@pytest.mark.parametrize(
    ("count", "num_ranks", "median", "max_tokens", "step_limit", "rank_limit"),
    [
        # By tokens 0.52 and 0.015, 0.79 and 0.14, 0.30 and 0.062.
        (100_000, 64, 1500, 32768, 0.01, 0.001),
        (20_000, 512, 3000, 32768, 0.06, 0.06),
        (512, 8, 4000, 32768, 0.015, 0.015),
    ],
)
def test_ranks_hardly_wait(count, num_ranks, median, max_tokens, step_limit, rank_limit):
    lengths = lognormal_lengths(count, median, max_tokens - 8).tolist()
    costs = qwen3_30b_flops(lengths)
    started = time.process_time()
    plan = schedule(lengths, num_ranks=num_ranks, max_tokens=max_tokens, costs=costs)
    assert time.process_time() - started < 1.5  # seconds of processor time
    assert len(plan[0]) == math.ceil(sum(lengths) / (num_ranks * max_tokens))
    of_steps, of_ranks = waiting(plan, costs)
    assert of_steps < step_limit and of_ranks < rank_limit


def fewest_bins(lengths, capacity):
    """Exact bin packing by trying everything."""
    best = len(lengths)

    def place(index, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(lengths):
            best = len(rooms)
            return
        for b in range(len(rooms)):
            if rooms[b] >= lengths[index]:
                place(index + 1, rooms[:b] + [rooms[b] - lengths[index]] + rooms[b + 1 :])
        place(index + 1, rooms + [capacity - lengths[index]])

    place(0, [])
    return best


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), slack=st.integers(0, 20))
def test_count_is_close_to_the_exact_minimum(lengths, slack):
    max_tokens = max(lengths) + slack
    count = len(schedule(lengths, num_ranks=1, max_tokens=max_tokens)[0])
    exact = fewest_bins(lengths, max_tokens)
    assert exact <= count <= 11 / 9 * exact + 6 / 9  # the bound of decreasing-fit packing


def test_worked_case():
    # 30 tokens over 2 ranks of 8 make ceil(30 / 16) = 2 micro-batches: 8 7 | 8 7 is level
    plan = schedule([8, 5, 3, 7, 4, 3], num_ranks=2, max_tokens=8)
    assert sorted(loads(plan, [8, 5, 3, 7, 4, 3])) == [[8, 7], [8, 7]]


def test_a_long_sequence_has_its_like_on_the_other_ranks():
    # mean micro-batch 6.5, but one sequence has 10: the other rank's first micro-batch fills up to
    # 10 as well
    lengths = [10, 5, 5, 3, 3]
    plan = schedule(lengths, num_ranks=2, max_tokens=10)
    assert sorted(loads(plan, lengths)) == [[10, 3], [10, 3]]


def test_bins_without_slack_need_best_fit():
    # levelling gives 9 9 8 8 and has no room for the last 2; every bin must be exactly full
    lengths = [7, 6, 5, 4, 4, 3, 3, 2, 2]
    plan = schedule(lengths, num_ranks=1, max_tokens=9)
    assert loads(plan, lengths) == [[9, 9, 9, 9]]


def test_loads_are_level_with_few_sequences_a_micro_batch():
    # eight sequences a micro-batch; placing alone leaves the heaviest 1.3 % above the mean
    lengths = [int(length) for length in lognormal_lengths(512, 3000, 16384)]
    plan = schedule(lengths, num_ranks=8, max_tokens=32768)
    token_loads = np.array(loads(plan, lengths))
    assert token_loads.max() / token_loads.mean() < 1.003


def test_no_sequences_and_fewer_than_ranks():
    assert schedule([], num_ranks=2, max_tokens=8, multiple_of=2) == [[[], []], [[], []]]
    assert sorted(schedule([3], num_ranks=2, max_tokens=8)) == [[[]], [[0]]]


@pytest.mark.parametrize(
    ("lengths", "change", "message"),
    [
        ([3, 9, 2], {}, "sequence 1 has 9 tokens but max_tokens is 8; raise max_tokens or lower"),
        ([3, 0], {}, "sequence 1 has length 0; lengths start at 1"),
        ([3.0], {}, "lengths is a 1-d float64 array"),
        ([3], {"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        ([3], {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ([3], {"multiple_of": 0}, "multiple_of is 0; it must be at least 1"),
        ([3], {"costs": [1, 2]}, "costs is a int64 array of shape .2.; give 1 integers from 1"),
        ([3], {"costs": [0]}, "costs is a int64 array of shape .1.; give 1 integers from 1"),
    ],
)
def test_bad_arguments(lengths, change, message):
    with pytest.raises(ValueError, match=message):
        schedule(lengths, **({"num_ranks": 2, "max_tokens": 8} | change))


def lognormal_lengths(count, median, longest, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(math.log(median), 1.0, count), 16, longest).astype(int)


@pytest.mark.parametrize(
    ("count", "num_ranks", "median", "max_tokens", "limit"),
    [(100_000, 64, 1500, 32768, 0.001), (512, 8, 4000, 32768, 0.005), (64, 4, 200, 2048, 0.03)],
)
def test_heavy_tails_stay_level(count, num_ranks, median, max_tokens, limit):
    lengths = lognormal_lengths(count, median, max_tokens - 8)
    padded = [padded_length(int(length), 4) for length in lengths]
    started = time.process_time()
    plan = schedule(padded, num_ranks=num_ranks, max_tokens=max_tokens)
    assert time.process_time() - started < 1  # seconds of processor time
    tokens = np.array(loads(plan, padded))  # [rank, micro-batch]
    assert tokens.shape[1] == math.ceil(sum(padded) / (num_ranks * max_tokens))
    mean = sum(padded) / num_ranks  # of a rank
    assert tokens.sum(axis=1).max() < (1 + limit) * mean  # the heaviest rank
    assert tokens.max(axis=0).sum() < (1 + limit) * mean  # all wait after each micro-batch
