import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.data.schedule import (
    padded_length,
    schedule,
    schedule_report,
)


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
def test_heavy_tails_stay_level_with_little_padding(count, num_ranks, median, max_tokens, limit):
    lengths = lognormal_lengths(count, median, max_tokens - 8)
    padded = [padded_length(int(length), 4) for length in lengths]
    started = time.process_time()
    plan = schedule(padded, num_ranks=num_ranks, max_tokens=max_tokens)
    assert time.process_time() - started < 1  # seconds of processor time
    report = schedule_report(
        plan, lengths, sequence_multiple=4, total_multiple=8, max_tokens=max_tokens
    )
    assert report.num_microbatches == math.ceil(sum(padded) / (num_ranks * max_tokens))
    assert report.padding_share < 0.01
    assert report.rank_imbalance < limit and report.step_imbalance < limit


def test_report_by_hand():
    # rank 0: (3 -> 4) + (5 -> 8) = 12; rank 1: (7 -> 8) and nothing. 15 tokens on 20 positions.
    report = schedule_report(
        [[[0, 1], []], [[2], []]], [3, 5, 7], sequence_multiple=4, max_tokens=16
    )
    assert report.num_microbatches == 2
    assert report.padding_share == pytest.approx(5 / 20)
    assert report.rank_imbalance == pytest.approx(12 / 10 - 1)
    assert report.step_imbalance == pytest.approx(12 / 10 - 1)
    assert report.fill == pytest.approx(20 / 64)
    assert schedule_report([[[]]], []).padding_share == 0.0
