"""Copies of tokens and their sums, against loops over the tokens' experts."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens, sum_copies

# tokens 0 to 3; expert 2 has no token
EXPERTS = [[0, 3], [1, 0], [3, 4], [4, 0]]
ROUTING_MAP = torch.zeros(4, 5, dtype=torch.bool).scatter(1, torch.tensor(EXPERTS), True)


@pytest.mark.parametrize("last_first", [False, True])
def test_copies_are_sorted_by_expert_and_found_again(last_first):
    copies = TokenCopies.of(ROUTING_MAP, 2, last_first=last_first)
    order = range(4, -1, -1) if last_first else range(5)
    expected = [(t, e) for e in order for t, experts in enumerate(EXPERTS) if e in experts]
    assert copies.token.tolist() == [token for token, _ in expected]
    assert copies.entry.tolist() == [5 * token + expert for token, expert in expected]
    for token, slots in enumerate(copies.slot.tolist()):
        assert [expected[slot] for slot in slots] == [(token, e) for e in sorted(EXPERTS[token])]


@pytest.mark.parametrize("last_first", [False, True])
def test_values_and_gradients(last_first):
    copies = TokenCopies.of(ROUTING_MAP, 2, last_first=last_first)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    factors = torch.randn(8, 1, dtype=torch.float64, generator=generator)
    rows = copy_tokens(x, copies)
    assert torch.equal(rows, x[copies.token])
    sums = sum_copies(rows * factors, copies)
    of_token = torch.zeros(4, 1, dtype=torch.float64).index_add(0, copies.token, factors)
    assert torch.allclose(sums, x * of_token)
    assert torch.autograd.gradcheck(lambda x: sum_copies(copy_tokens(x, copies).sin(), copies), x)


def test_chunks_are_put_in_order_as_megatron_does():
    sizes = torch.tensor([2, 0, 1, 3, 4, 1])
    order = torch.tensor([4, 0, 3, 1, 5, 2])
    x = torch.arange(33.0).view(11, 3)
    expected, probs = sort_chunks_by_idxs(x, sizes, order, probs=x[:, 0])
    copies = TokenCopies.of_chunks(sizes, order, x.device)
    assert torch.equal(copy_tokens(x, copies), expected)
    assert torch.equal(x[:, 0][copies.entry], probs)
    assert torch.equal(sum_copies(expected, copies), x)


def test_no_tokens():
    copies = TokenCopies.of(ROUTING_MAP[:0], 2)
    x = torch.empty(0, 3, requires_grad=True)
    sum_copies(copy_tokens(x, copies), copies).sum().backward()
    assert x.grad.shape == (0, 3)
