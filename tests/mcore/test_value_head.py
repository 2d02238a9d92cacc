"""The value head of one process; layouts are in `test_value_steps.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_gspo.mcore.value_head import ValueHead, token_values
from megatron_gspo.parallel.scored_rows import ScoredRows


def head(dtype: torch.dtype, *, sequence_parallel: bool = False) -> ValueHead:
    return ValueHead(
        SimpleNamespace(hidden_size=4, params_dtype=dtype, sequence_parallel=sequence_parallel)
    )


def test_it_begins_at_zero():
    made = head(torch.bfloat16, sequence_parallel=True)
    assert (
        made.weight.shape == (1, 4)
        and made.weight.dtype == torch.bfloat16
        and not made.weight.any()
    )
    assert made.weight.sequence_parallel and not head(torch.float32).weight.sequence_parallel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_of_scored_positions(dtype):
    made = head(dtype)
    hidden = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 2.0, -1.0, 0.5]]))
    scored = ScoredRows.of(torch.tensor([0, 1, 0, 1, 1]))
    hidden.requires_grad_()
    values = token_values(made, hidden, scored, None, sequence_parallel=False)
    expected = hidden.detach().double() @ made.weight.detach().double()[0]
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        values.double(), expected * torch.tensor([0, 1, 0, 1, 1]), atol=1e-6, rtol=1e-6
    )
    values.sum().backward()
    assert (hidden.grad.abs().sum(1) > 0).tolist() == [False, True, False, True, True]


def test_without_a_scored_position_there_is_a_gradient_of_zero():
    made = head(torch.float32)
    hidden = torch.ones(3, 4, requires_grad=True)
    token_values(
        made, hidden, ScoredRows.of(torch.zeros(3)), None, sequence_parallel=False
    ).sum().backward()
    assert not hidden.grad.any() and not made.weight.grad.any()
