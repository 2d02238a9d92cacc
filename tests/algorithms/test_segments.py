"""Sums by sequence: exact, in float64, over one rank and over all."""

import pytest
import torch

from megatron_gspo.algorithms import Segments
from megatron_gspo.algorithms.segments import segment_sums

IDS = torch.tensor([0, 0, 2, 2, 2])


def test_sums_by_hand():
    values = torch.tensor([1.0, 2.0, 0.5, 0.25, -4.0])
    got = segment_sums(values, IDS, 4)
    assert got.dtype == torch.float64 and got.tolist() == [3.0, 0.0, -3.25, 0.0]
    assert segment_sums(values[:0], IDS[:0], 2).tolist() == [0.0, 0.0]
    assert segment_sums(values[:0], IDS[:0], 0).shape == (0,)


def test_bools_are_counted():
    got = segment_sums(torch.tensor([True, False, True, True, True]), IDS, 3)
    assert got.dtype == torch.float64 and got.tolist() == [1.0, 0.0, 3.0]


def test_float32_values_are_summed_in_float64():
    """1e8 + 1 - 1e8 is 0 in float32."""
    values = torch.tensor([1e8, 1.0, -1e8])
    assert segment_sums(values, torch.zeros(3, dtype=torch.long), 1).item() == 1.0


def test_one_collective_sums_both_rows():
    segments = Segments(torch.ones(5), IDS, 3)
    sums, counts = segments.sums(torch.arange(5.0)), segments.sums(torch.ones(5))
    assert sums.tolist() == [1, 0, 9] and counts.tolist() == [2, 0, 3]
    alone = segments.sum_ranks(sums, counts)
    assert torch.equal(alone[0], sums) and torch.equal(alone[1], counts)
    rows = []
    both = Segments(torch.ones(5), IDS, 3, lambda x: rows.append(x) or x * torch.tensor([[2.0], [3.0]]))
    total, lengths = both.sum_ranks(sums, counts)
    assert total.tolist() == [2, 0, 18] and lengths.tolist() == [6, 0, 9]
    ((row, count),) = rows
    assert row.tolist() == sums.tolist() and count.tolist() == counts.tolist() and rows[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_a_loop(dtype):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (300,), generator=g)
    values = torch.randn(300, generator=g, dtype=dtype)
    expected = [sum(v for v, i in zip(values.tolist(), ids.tolist(), strict=True) if i == k) for k in range(7)]
    assert segment_sums(values, ids, 7).tolist() == pytest.approx(expected, rel=1e-12)


def test_untrained_positions_are_zero_in_value_and_gradient():
    segments = Segments(torch.tensor([True, False, True, False, False]), IDS, 3)
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf"), 5.0], requires_grad=True)
    got = segments.trained(values, torch.float64)
    assert got.dtype == torch.float64 and got.tolist() == [1, 0, 3, 0, 0]
    got.sum().backward()
    assert values.grad.tolist() == [1, 0, 1, 0, 0]
    assert segments.trained(torch.arange(5), torch.float32).dtype == torch.float32
