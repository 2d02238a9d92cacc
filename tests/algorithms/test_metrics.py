"""Metrics of one call by hand. What `finish_metrics` makes of them is in test_worked_cases.py."""

import math

import pytest
import torch

from megatron_gspo.algorithms import Segments, preset
from megatron_gspo.algorithms.aggregation import TokenWeights, token_weights
from megatron_gspo.algorithms.metrics import ratio_metrics
from megatron_gspo.algorithms.ratio_levels import sequence_level, token_level

MASK = torch.tensor([True, True, True, False])
IDS = torch.tensor([0, 0, 1, 1])
RATIO = torch.tensor([2.0, 0.5, 1.1, 1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64)


def metrics_of(level, objective, num_sequences=2, num_tokens=3, ratio=RATIO):
    segments = Segments(MASK, IDS, 2)
    log_ratio = ratio.log().requires_grad_()
    _, lengths, stats = level(objective, log_ratio, ADVANTAGES, segments)
    weights = token_weights(objective, IDS, lengths, num_sequences, num_tokens, torch.float64)
    found = ratio_metrics(objective, stats, weights)
    assert not any(value.requires_grad for value in found.values())
    return {name: value.item() for name, value in found.items()}


def test_token_level_by_hand():
    """Tokens 2.0 (A > 0) and 0.5 (A < 0) of the first response are clipped, 1.1 is not."""
    found = metrics_of(token_level, preset("grpo", epsilon_low=0.2, epsilon_high=0.3))
    k3 = [r - 1 - math.log(r) for r in (2.0, 0.5, 1.1)]
    assert found == pytest.approx({
        "clip_fraction/tokens": 2 / 3, "clip_fraction/sequences": 1 / 2,
        "clip_fraction/lower": 1 / 3, "clip_fraction/upper": 1 / 3,
        "ratio/mean": (2 + 0.5 + 1.1) / 3, "ratio/square_deviation": (1 + 0.25 + 0.01) / 3,
        "ratio_max": 2.0, "ratio_min": 0.5, "log_ratio_clamped": 0.0, "kl/old_policy": sum(k3) / 3,
        "ratio_token/outside_band": 0.0,  # 2.0 and 0.5 are its ends
    })  # fmt: skip


def test_sequence_level_by_hand():
    """Ratios sqrt(2 * 0.5) = 1 and 1.1: only the second response, one token of three, is clipped."""
    found = metrics_of(sequence_level, preset("gspo", epsilon_low=0.05, epsilon_high=0.05))
    k3 = [r - 1 - math.log(r) for r in (2.0, 0.5, 1.1)]
    assert found == pytest.approx({
        "clip_fraction/tokens": 1 / 3, "clip_fraction/sequences": 1 / 2,
        "clip_fraction/lower": 0.0, "clip_fraction/upper": 1 / 3,
        "ratio/mean": (1 + 1.1) / 2, "ratio/square_deviation": 0.01 / 2,
        "ratio_max": 1.1, "ratio_min": 1.0, "log_ratio_clamped": 0.0, "kl/old_policy": sum(k3) / 3,
        "ratio_token/outside_band": 0.0,
    }, abs=1e-12)  # fmt: skip


@pytest.mark.parametrize("level", [token_level, sequence_level])
def test_they_are_shares_of_the_mini_batch(level):
    """The counts are those of the whole mini-batch: twice as many halve every share, extremes stay."""
    objective = preset("grpo") if level is token_level else preset("gspo")
    one, half = metrics_of(level, objective), metrics_of(level, objective, num_sequences=4, num_tokens=6)
    for name, value in one.items():
        assert half[name] == pytest.approx(value if name.endswith(("_max", "_min")) else value / 2, abs=1e-15), name


def test_a_clamped_log_ratio_is_counted_and_limits_the_kl():
    found = metrics_of(token_level, preset("grpo", max_log_ratio=0.5))
    k3 = [math.exp(d) - 1 - d for d in (0.5, -0.5, math.log(1.1))]
    assert found["log_ratio_clamped"] == pytest.approx(2 / 3)
    assert found["kl/old_policy"] == pytest.approx(sum(k3) / 3)


@pytest.mark.parametrize("level", [token_level, sequence_level])
def test_tokens_beyond_a_factor_of_two_are_counted(level):
    """Ratios 2.1 and 0.45 of three trained tokens; whether one is clipped or clamped has no part in it."""
    objective = preset("grpo" if level is token_level else "gspo", max_log_ratio=0.1)
    ratio = torch.tensor([2.1, 0.45, 1.99, 1.0], dtype=torch.float64)
    assert metrics_of(level, objective, ratio=ratio)["ratio_token/outside_band"] == pytest.approx(2 / 3)


def test_the_dual_clip_has_a_fraction_of_its_own():
    found = metrics_of(token_level, preset("grpo", dual_clip=1.5))
    assert found["clip_fraction/dual"] == 0  # 2.0 has A > 0
    assert "clip_fraction/dual" not in metrics_of(token_level, preset("grpo"))


def test_without_a_ratio_nothing_is_clipped():
    weights = TokenWeights(torch.tensor(0.5), torch.ones(1), torch.tensor(0.5))
    found = ratio_metrics(preset("sft"), None, weights)
    assert set(found) == {f"clip_fraction/{what}" for what in ("tokens", "sequences", "lower", "upper")}
    assert {(value.item(), value.dtype) for value in found.values()} == {(0.0, torch.float32)}
