import math

import pytest
import torch

from megatron_gspo.algorithms import effective_sample_size, quantiles, ratio_quantiles


def test_quantiles_interpolate():
    values = torch.arange(101.0).flip(0)
    assert quantiles(values) == {"min": 0, "p01": 1, "p50": 50, "p99": 99, "max": 100}
    assert quantiles(torch.tensor([1.0, 2.0])) == pytest.approx(
        {"min": 1, "p01": 1.01, "p50": 1.5, "p99": 1.99, "max": 2}
    )
    assert quantiles(torch.zeros(0)) == {}
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.quantile(values, torch.tensor([0, 0.01, 0.5, 0.99, 1], dtype=torch.float64)).tolist()
    assert list(quantiles(values).values()) == pytest.approx(expected)


def test_ratio_quantiles_by_hand():
    old = torch.full((6,), -1.0)
    log_ratio = torch.tensor([0.1, 0.3, math.nan, -0.2, 0.0, 9.0])
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0])
    got = ratio_quantiles(old + log_ratio, old, mask, torch.tensor([0, 0, 0, 2, 2, 1]))
    assert got["ratio_token/min"] == pytest.approx(math.exp(-0.2))
    assert got["ratio_token/max"] == pytest.approx(math.exp(0.3))
    assert got["ratio_token/p50"] == pytest.approx((1 + math.exp(0.1)) / 2)
    assert got["ratio_sequence/min"] == pytest.approx(math.exp(-0.1))
    # sequence 1 has no trained token: two ratios, not a third one of 1
    assert got["ratio_sequence/p50"] == pytest.approx((math.exp(-0.1) + math.exp(0.2)) / 2)
    assert got["ratio_sequence/max"] == pytest.approx(math.exp(0.2))
    assert len(got) == 10
    assert ratio_quantiles(old, old, torch.zeros(6), torch.zeros(6, dtype=torch.long)) == {}


def test_effective_sample_size():
    assert effective_sample_size(torch.full((8,), 0.3)) == pytest.approx(1)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(1 / 4)
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 10 / 2)
    assert math.isnan(effective_sample_size(torch.zeros(0)))
    # 1e-30 squared is 0 in float32
    assert effective_sample_size(torch.tensor([1e-30, 3e-30])) == pytest.approx(16 / 10 / 2)
