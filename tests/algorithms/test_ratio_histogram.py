"""Quantiles from histograms: against sorted values, split over ranks in any way."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.algorithms.ratio_histogram import (
    _LARGEST,
    QUANTILES,
    RELATIVE_ERROR,
    RatioHistogram,
    _bins_of,
    quantiles_of,
)
from tests.support.distributed import run_distributed


def histogram_of(log_ratio: torch.Tensor) -> RatioHistogram:
    histogram = RatioHistogram()
    histogram.add(log_ratio)
    return histogram


def exact(log_ratio: torch.Tensor) -> dict[str, float]:
    """Sorted and interpolated in float64."""
    ratios = log_ratio.double().exp()
    quantiles = torch.quantile(
        ratios, torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    ).tolist()
    return dict(zip(QUANTILES, quantiles, strict=True))


def check(quantiles: dict[str, float], expected: dict[str, float]) -> None:
    assert list(quantiles) == list(expected)
    for name in ("min", "max"):
        assert quantiles[name] == pytest.approx(expected[name], rel=1e-12)
    for name in expected:
        assert abs(quantiles[name] - expected[name]) <= RELATIVE_ERROR * expected[name], name


LOG_RATIOS = st.one_of(
    st.floats(-30, 30),
    st.floats(-1e-3, 1e-3),
    st.floats(-1e-9, 1e-9),
    st.sampled_from([0.0, 0.1, -0.1, 1e-8, 32.0]),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(LOG_RATIOS, min_size=1, max_size=60), st.integers(1, 4))
def test_against_sorted_values_however_they_are_split(values, parts):
    d = torch.tensor(values, dtype=torch.float64)
    total = RatioHistogram()
    for i in range(parts):
        total.add(d[i::parts])
    assert int(total.counts.sum()) == len(values)
    check(total.quantiles(), exact(d))


@pytest.mark.parametrize("scale", [2e-4, 3e-2, 0.7, 8.0])
def test_the_log_of_a_ratio_near_1_is_known_within_1_percent(scale):
    d = scale * torch.randn(
        200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    quantiles = histogram_of(d).quantiles()
    expected = exact(d)
    check(quantiles, expected)
    for name in ("p01", "p99"):
        allowed = min(0.01 * abs(math.log(expected[name])), 1e-3) + 1e-12
        assert abs(math.log(quantiles[name] / expected[name])) <= allowed


def test_extremes_beyond_the_range_are_exact():
    quantiles = histogram_of(torch.tensor([-50.0, 0.0, 0.0, 40.0])).quantiles()
    assert quantiles["min"] == pytest.approx(math.exp(-50)) and quantiles["max"] == pytest.approx(
        math.exp(40)
    )
    assert quantiles["p50"] == 1.0
    assert histogram_of(torch.zeros(0)).quantiles() == {}
    for nan in (math.nan, -math.nan):
        histogram = histogram_of(torch.tensor([0.0, 0.0, nan]))
        assert histogram.counts.nonzero()[-1] == _bins_of(torch.tensor([_LARGEST])), (
            "NaN counts as the largest"
        )
        broken = histogram.quantiles()
        assert math.isnan(broken["max"]) and broken["p50"] == 1.0


def test_a_quantile_is_not_beyond_the_extremes():
    """The centre of the bin of -0.03 is below it, that of 0.03 above."""
    for d in (-0.03, 0.03):
        quantiles = histogram_of(torch.full((9,), d, dtype=torch.float64)).quantiles()
        assert (
            quantiles["min"]
            == quantiles["p01"]
            == quantiles["p50"]
            == quantiles["p99"]
            == quantiles["max"]
            == math.exp(d)
        )


def test_the_largest_ratios():
    """A log-ratio beyond 32 nats counts as 32, and no ratio is infinite."""
    quantiles = histogram_of(torch.tensor([0.0, 32.6, 40.0])).quantiles()
    assert quantiles["p50"] == pytest.approx(math.exp(32.0), rel=RELATIVE_ERROR)
    quantiles = histogram_of(torch.full((3,), 800.0)).quantiles()
    assert quantiles["min"] == quantiles["max"] == math.exp(700.0)


def of_ranks(rank: int, world: int, values: torch.Tensor) -> tuple[dict[str, float], int]:
    sent = 0

    def reduce(op):
        def apply(x):
            nonlocal sent
            sent += x.nbytes
            x = x.clone()
            torch.distributed.all_reduce(x, op=op)
            return x

        return apply

    own_values = values[rank::world] if rank else values[:0]  # the first rank has none
    ops = torch.distributed.ReduceOp
    quantiles = quantiles_of([histogram_of(own_values)], reduce(ops.SUM), reduce(ops.MAX))
    return quantiles[0], sent


def test_ranks_exchange_a_few_kilobytes():
    d = 0.05 * torch.randn(30_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = run_distributed(of_ranks, 3, d)
    expected = exact(torch.cat([d[1::3], d[2::3]]))
    for quantiles, sent in results:
        check(quantiles, expected)
        assert quantiles == results[0][0] and sent < 9 * 1024


def test_several_histograms_are_reduced_together():
    """One of them is empty; each has the quantiles that it has alone."""
    parts = [histogram_of(torch.tensor(d)) for d in ([0.0, 0.5, -1.0], [], [0.02] * 5)]
    calls = []
    together = quantiles_of(parts, lambda x: calls.append(x) or x, lambda x: calls.append(x) or x)
    assert together == [one.quantiles() for one in parts] and together[1] == {}
    assert len(calls) == 3
