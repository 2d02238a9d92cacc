"""Copies of tokens and their sums, against loops over the tokens' experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens, sum_copies

# tokens 0 to 3 and their experts; expert 2 has no token
EXPERTS = {
    "two of each": [[0, 3], [1, 0], [3, 4], [4, 0]],
    "none to three": [[0, 3, 4], [], [3], [4, 0]],
}


def token_map(experts: list[list[int]]) -> Tensor:
    result = torch.zeros(len(experts), 5, dtype=torch.bool)
    for row, chosen in zip(result, experts, strict=True):
        row[chosen] = True
    return result


def copies_of(experts: list[list[int]], last_first: bool = False) -> TokenCopies:
    counts = [len(chosen) for chosen in experts]
    return TokenCopies.of(token_map(experts), sum(counts), most=max(counts), last_first=last_first)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS)
def test_copies_are_sorted_by_expert_and_found_again(experts, last_first):
    copies = copies_of(experts, last_first)
    order = range(4, -1, -1) if last_first else range(5)
    expected = [(t, e) for e in order for t, chosen in enumerate(experts) if e in chosen]
    assert copies.token.tolist() == [token for token, _ in expected]
    assert copies.entry.tolist() == [5 * token + expert for token, expert in expected]
    in_turn = [(t, e) for t, chosen in enumerate(experts) for e in sorted(chosen)]
    assert [expected[slot] for slot in copies.slot.tolist()] == in_turn
    begins = [[t for t, _ in in_turn].index(t) if experts[t] else None for t in range(4)]
    for begin, first in zip(begins, copies.first.tolist(), strict=True):
        assert begin is None or begin == first


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS)
def test_values_and_gradients(experts, last_first):
    copies = copies_of(experts, last_first)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    count = len(copies.token)
    factors = torch.randn(count, 1, dtype=torch.float64, generator=generator)
    rows = copy_tokens(x, copies)
    assert torch.equal(rows, x[copies.token])
    sums = sum_copies(rows * factors, copies)
    of_token = torch.zeros(4, 1, dtype=torch.float64).index_add(0, copies.token, factors)
    assert torch.allclose(sums, x * of_token)
    assert torch.autograd.gradcheck(lambda x: sum_copies(copy_tokens(x, copies).sin(), copies), x)


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_copies(tokens):
    copies = TokenCopies.of(torch.zeros(tokens, 5, dtype=torch.bool), 0, most=2)
    x = torch.ones(tokens, 3, requires_grad=True)
    sums = sum_copies(copy_tokens(x, copies), copies)
    sums.sum().backward()
    assert sums.shape == x.shape and not sums.any() and not x.grad.any()
