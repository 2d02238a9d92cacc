"""Weights of tokens in a mini-batch's figures, by hand, and weighted sums."""

import pytest
import torch

from megatron_gspo.algorithms import Objective, preset
from megatron_gspo.algorithms.aggregation import TokenWeights, token_weights, weighted_sum

IDS = torch.tensor([0, 0, 1, 2, 2])
LENGTHS = torch.tensor([2.0, 4.0, 0.0], dtype=torch.float64)  # sequence 1 has tokens on other ranks, 2 has none


def weights(objective: Objective, num_sequences=2, num_tokens=6, dtype=torch.float32) -> TokenWeights:
    return token_weights(objective, IDS, LENGTHS, num_sequences, num_tokens, dtype)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_by_hand(as_tensor):
    counts = (torch.tensor(3), torch.tensor(8)) if as_tensor else (3, 8)
    for name, scale, expected in (
        ("gspo", {}, [1 / 6, 1 / 6, 1 / 12, 1 / 3, 1 / 3]),  # 1 / (N |y|), |y| = 0 as if it were 1
        ("dapo", {}, 1 / 8),
        ("dr_grpo", {"loss_scale_factor": 16}, 1 / 48),
    ):
        got = weights(preset(name, **scale), *counts)
        assert got.token.tolist() == 1 / 8 and got.sequence.tolist() == pytest.approx([1 / 6, 1 / 12, 1 / 3])
        assert got.objective.tolist() == pytest.approx(expected)
        assert {x.dtype for x in (got.token, got.sequence, got.objective)} == {torch.float32}
        assert not any(x.requires_grad for x in (got.token, got.sequence, got.objective))


def test_the_weights_have_the_dtype_that_was_asked_for():
    for mode, extra in (("dapo", {}), ("grpo", {}), ("dr_grpo", {"loss_scale_factor": 3})):
        got = weights(preset(mode, **extra), dtype=torch.float64)
        assert {x.dtype for x in (got.token, got.sequence, got.objective)} == {torch.float64}
    third = weights(preset("dr_grpo", loss_scale_factor=3), num_sequences=1, dtype=torch.float64).objective
    assert third.item() == 1 / 3  # divided in float64, not in float32


def test_tokens_default_to_the_lengths():
    assert weights(preset("gspo"), num_tokens=None).token.item() == pytest.approx(1 / 6)
    empty = token_weights(preset("gspo"), IDS[:0], LENGTHS[:0], 1, None, torch.float32)
    assert empty.token.item() == 1.0 and empty.sequence.shape == empty.objective.shape == (0,)


def test_a_missing_scale_is_refused_where_it_divides():
    with pytest.raises(ValueError, match="loss_scale_factor = None .*set the longest response in tokens"):
        weights(preset("dr_grpo"))


def test_weighted_sums_by_hand():
    values = torch.tensor([1.0, 2.0, -4.0])
    assert weighted_sum(values, torch.tensor(0.5)).item() == -0.5
    assert weighted_sum(values, torch.tensor([1.0, 0.5, 0.25])).item() == 1.0
    chosen = torch.tensor([True, False, True])
    assert weighted_sum(chosen, torch.tensor(0.5)).item() == 1.0
    assert weighted_sum(chosen, torch.tensor([1.0, 0.5, 0.25])).item() == 1.25


def test_weighted_sums_keep_the_dtype_of_the_weights():
    for dtype in (torch.float32, torch.float64):
        for values in (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=dtype)):
            for factor in (torch.ones((), dtype=dtype), torch.ones(3, dtype=dtype)):
                assert weighted_sum(values, factor).dtype == dtype


def test_weighted_sums_pass_the_gradient():
    for factor in (torch.tensor(0.5), torch.tensor([0.5, 0.25])):
        values = torch.ones(2, requires_grad=True)
        weighted_sum(values, factor).backward()
        assert torch.equal(values.grad, factor.expand(2))
