import math

import pytest
import torch

from megatron_gspo.algorithms import effective_sample_size, ratio_quantiles


def test_ratio_quantiles_by_hand():
    old = torch.full((6,), -1.0)
    log_ratio = torch.tensor([0.1, 0.3, math.nan, -0.2, 0.0, 9.0])
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0])
    got = ratio_quantiles(old + log_ratio, old, mask, torch.tensor([0, 0, 0, 2, 2, 1]))
    assert got["ratio_token/min"] == pytest.approx(math.exp(-0.2))
    assert got["ratio_token/max"] == pytest.approx(math.exp(0.3))
    assert got["ratio_token/p50"] == pytest.approx((1 + math.exp(0.1)) / 2, rel=1e-3)
    assert got["ratio_sequence/min"] == pytest.approx(math.exp(-0.1))
    # sequence 1 has no trained token: two ratios, not a third one of 1
    assert got["ratio_sequence/p50"] == pytest.approx(
        (math.exp(-0.1) + math.exp(0.2)) / 2, rel=1e-3
    )
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
