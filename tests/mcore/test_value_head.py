"""The value head of one process; layouts are in `test_value_steps.py`."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_without_a_scored_position_there_is_a_gradient_of_zero():
    made = head(torch.float32)
    hidden = torch.ones(3, 4, requires_grad=True)
    token_values(
        made, hidden, ScoredRows.of(torch.zeros(3)), None, sequence_parallel=False
    ).sum().backward()
    assert not hidden.grad.any() and not made.weight.grad.any()
