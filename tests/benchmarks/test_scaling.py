"""Fits by hand, rows from hand-made timings, and worlds of real processes."""

from __future__ import annotations

import time

import pytest

from benchmarks import worlds
from benchmarks.common import Seconds, Spread
from benchmarks.scaling import (
    BARE,
    exponent,
    fit_row,
    fixed_lengths,
    in_turns,
    linear_and_quadratic,
    overhead_row,
    speedup_row,
)
from benchmarks.step_vs_megatron import make_samples
from benchmarks.worlds import World
from tests.support import distributed


def test_exponents_by_hand():
    assert exponent([1, 2, 4, 8], [3, 6, 12, 24]) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))
    assert exponent([1, 10, 100], [5, 500, 50_000])[0] == pytest.approx(2.0)
    assert exponent([4, 8, 16], [7, 7, 7]) == (0.0, 0.0)
    # 1, 2, 2 over 1, 2, 4: slope 1/2; off by -1/6, 1/3, -1/6 of log 2
    slope, left = exponent([1, 2, 4], [1, 2, 2])
    assert slope == pytest.approx(0.5)
    assert left == pytest.approx(0.6931 * (1 / 18) ** 0.5, rel=1e-3)


def test_linear_and_quadratic_parts_by_hand():
    assert linear_and_quadratic([1, 2, 4], [5, 14, 44]) == pytest.approx((3.0, 2.0, 0.0), abs=1e-12)
    assert linear_and_quadratic([1, 2, 4], [3, 6, 12]) == pytest.approx((3.0, 0.0, 0.0), abs=1e-12)
    # twice as many take less than twice as long: no quadratic part; off by 1/5 and -2/5 of a mean of (1 + 2) / (1 + 4)
    a, b, left = linear_and_quadratic([1, 2], [1, 1])
    assert (a, b) == (pytest.approx(3 / 5), 0.0) and left == pytest.approx(((0.4**2 + 0.2**2) / 2) ** 0.5)
    assert linear_and_quadratic([1, 2], [1, 8])[:2] == (0.0, pytest.approx(1.5 / 1.25))


def test_fit_rows_compare_the_growth_per_doubling():
    taken = {("f", size, who): [Seconds(1e-3 * size**power, 0.0)] * 3 for who, power in {"ours": 2, BARE: 1}.items()
             for size in (1, 2, 4)}  # fmt: skip
    row = fit_row("f", [1, 2, 4], taken)
    assert (row.ours.median, row.peer.median, row.ratio.median) == pytest.approx((2.0, 1.0, 2.0))
    assert row.note == "1 to 4: 1, 4, 16 ms; residual 0 %"


def test_speedup_is_beside_the_cores_and_processor_time_beside_one_process():
    taken = {(1, "ours"): [Seconds(8.0, 8.0)] * 3, (4, "ours"): [Seconds(5.0, 9.6)] * 3,
             (1, BARE): [Seconds(6.0, 6.0)] * 3, (4, BARE): [Seconds(4.0, 9.0)] * 3}  # fmt: skip
    row = speedup_row("data", 4, 2, taken)
    assert (row.ours.median, row.peer.median, row.ratio.median) == pytest.approx((1.6, 2.0, 0.8))
    assert row.better == "higher" and row.note == "bare Megatron: 1.50 x"
    row = overhead_row("data", 4, taken)
    assert (row.ours.median, row.peer.median, row.ratio.median) == pytest.approx((9600.0, 8000.0, 1.2))
    assert row.note == "bare Megatron: 1.50"


def test_samples_of_one_length():
    samples = fixed_lengths(make_samples(4, 3, 10, 50), 10)
    assert {sample.length for sample in samples} == {13}
    assert all(sample.response_length == 10 == len(sample.old_log_probs) == len(sample.loss_mask) for sample in samples)


def prepare(rank, size, seconds):
    def fail():
        raise ValueError(f"rank {rank} has had enough")

    return {"sleep": lambda: time.sleep(seconds * rank), "work": lambda: sum(range(10_000)), "fail": fail}


@pytest.fixture
def one_fork_server(monkeypatch):
    """A process has one fork server: that of the other tests, with their imports loaded."""
    monkeypatch.setattr(worlds, "fork_server", distributed.fork_server)


def test_worlds_take_turns_and_wait_for_their_slowest(one_fork_server):
    with World(1, prepare, 0.0) as one, World(2, prepare, 0.2) as two:
        one.ready()
        two.ready()
        taken = in_turns({1: (one, "work"), 2: (two, "sleep")}, 3, 60.0)
        assert [len(turns) for turns in taken.values()] == [3, 3]
        assert min(turn.wall for turn in taken[2]) >= 0.2
        assert Spread.of([turn.wall for turn in taken[1]]).median < 0.2 and all(turn.cpu > 0 for turn in taken[1])
        with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1: Traceback.*rank 0 has had enough"):
            one.time("fail")


def test_a_world_that_takes_too_long_is_given_up(one_fork_server):
    with World(2, prepare, 30.0, limit=30.0) as world:
        world.ready()
        world.limit = 0.2
        with pytest.raises(RuntimeError, match="a world of 2 processes took longer than 0 s"):
            world.time("sleep")
