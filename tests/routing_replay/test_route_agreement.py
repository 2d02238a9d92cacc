"""Levels and runs of rows by hand, and how often healthy rows are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_gspo.routing_replay.route_agreement import (
    FALSE_ALARM,
    Levels,
    disagreeing_rows,
    level_sums,
    route_mismatch,
)

NAN = math.nan
HALF = Levels(expected=1.0, chance=0.5, rows=10)


def test_the_levels_by_hand():
    shares = np.array([[1.0, 0.25, NAN], [0.5, NAN, 0.0], [NAN, 0.5, 0.5]])
    sums = level_sums(shares)
    assert sums.tolist() == [[1.5, 2], [0.75, 2], [0.5, 2]]
    measured = Levels.of(sums, same_routers=False)
    assert measured == Levels(expected=0.75, chance=0.25, rows=2) and measured.middle == 0.5
    assert Levels.of(sums, same_routers=True) == Levels(expected=1.0, chance=0.25, rows=2)


def test_shifted_routes_show_the_levels_of_a_healthy_pass():
    """The next row is the token's; its own row is another's."""
    assert Levels.of(np.array([[20.0, 100], [98, 100], [30, 100]]), same_routers=False) == Levels(
        0.98, 0.2, 100
    )


@pytest.mark.parametrize(
    "sums",
    [[[0.0, 0], [0, 0], [0, 0]], [[5, 5], [0, 0], [5, 5]], [[5, 5], [4, 4], [4, 4]]],
    ids=["no rows", "no neighbours", "all rows are equal"],
)
def test_nothing_is_said_where_rows_cannot_be_told_apart(sums):
    assert Levels.of(np.array(sums), same_routers=True) is None


def test_the_score_by_hand():
    """chance 0.5, middle 0.75: a row that agrees has log(2/3), one that does not log(2)."""
    scores = HALF.scores(np.array([1.0, 0.0, 0.5]))
    assert scores == pytest.approx(
        [math.log(2 / 3), math.log(2), (math.log(2 / 3) + math.log(2)) / 2], rel=1e-12
    )


def naive(own: np.ndarray, levels: Levels) -> tuple[float, int, int]:
    """(largest sum of consecutive scores, its bounds), by trying all."""
    scores = [
        x * math.log(levels.chance / levels.middle)
        + (1 - x) * math.log((1 - levels.chance) / (1 - levels.middle))
        for x in own.tolist()
    ]
    every = [
        (math.fsum(scores[a:b]), a, b) for a in range(len(own)) for b in range(a + 1, len(own) + 1)
    ]
    return max(every, key=lambda one: (round(one[0], 9), -one[2], one[1]))


def test_the_run_of_rows_is_the_one_with_most_evidence():
    g = np.random.default_rng(3)
    for bad in (0, 20, 40, 60):
        agreement = (g.random(120) < 0.95).astype(float)
        agreement[30 : 30 + bad] = g.random(bad) < 0.5
        levels = Levels(1.0, 0.5, rows=1)
        best, first, end = naive(agreement, levels)
        refused = disagreeing_rows(agreement, levels)
        if best <= math.log(1 / FALSE_ALARM):
            assert refused is None
        else:
            assert (refused.start, refused.stop) == (first, end)
    assert refused is not None and disagreeing_rows(agreement[:0], levels) is None


def test_more_rows_need_more_evidence():
    agreement = np.zeros(22)  # 22 log 2 = 15.2; log(1 / 1e-6) = 13.8, log(10 / 1e-6) = 16.1
    assert disagreeing_rows(agreement, Levels(1.0, 0.5, rows=1)) == slice(0, 22)
    assert disagreeing_rows(agreement, Levels(1.0, 0.5, rows=10)) is None


def test_rows_that_agree_halfway_are_hardly_ever_refused():
    """20,000 passes of 64 rows: the bound allows one in a million."""
    g = np.random.default_rng(0)
    levels = Levels(expected=1.0, chance=0.2, rows=64)
    agreement = (g.random((20_000, 64)) < levels.middle).astype(float)
    assert not any(disagreeing_rows(row, levels) for row in agreement)
    weight = np.exp(levels.scores(agreement)).mean()
    assert weight == pytest.approx(1.0, abs=0.01), "the mean that makes the bound hold"


def test_the_message_names_sample_tokens_and_shift():
    starts = np.array([0, 30, 110, 150])
    shares = np.full((150, 3), 0.2)
    shares[:, 0] = 1.0
    shares[[29, 109, 149], 1] = NAN  # the last rows have no next one, the first no previous one
    shares[[0, 30, 110], 2] = NAN
    names = [(4, 0), (4, 1), (7, 0)]
    levels = Levels(expected=1.0, chance=0.2, rows=150)
    assert route_mismatch(shares, starts, names, levels) == ""
    shares[40:110, :2] = shares[40:110, 1::-1]  # the next row is the token's
    shares[109, 0] = 0.2
    assert (
        route_mismatch(shares, starts, names, levels)
        == "sample 4/1: routed_experts of tokens 10 to 79 agree with 20% of the live routers'"
        " experts; 100% was expected, and another token's agree with 20%; rows of the token"
        " after fit, so they are shifted by one"
    )
    shares[110:130, 0] = 0.1
    message = route_mismatch(shares, starts, names, levels)
    assert message.startswith("sample 4/1 (and 1 more): routed_experts of tokens 10 to 79")
    shares[:, 0] = NAN
    assert route_mismatch(shares, starts, names, levels) == ""
