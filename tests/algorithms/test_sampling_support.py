"""Log-probs over the ids that a sampler could draw, against a loop in double precision."""

from __future__ import annotations

import math

import torch

from megatron_gspo.algorithms import over_support


def test_value_and_gradient_against_a_loop():
    """Supports of three, one and no ids, of a vocabulary of seven."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = [4, 2, 5]
    supports = [[4, 0, 6], [2], []]
    ids = torch.tensor([[4, 0, 6], [2, 0, 0], [0, 0, 0]])
    is_present = torch.tensor([[True, True, True], [True, False, False], [False] * 3])
    every = logits.log_softmax(1)
    value = over_support(every[range(3), labels], every.gather(1, ids), is_present)
    weights = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)
    (value * weights).sum().backward()
    expected = torch.zeros_like(logits)
    for token, (label, support) in enumerate(zip(labels, supports, strict=True)):
        shares = {v: math.exp(float(logits.detach()[token, v])) for v in support or range(7)}
        total = sum(shares.values())
        assert math.isclose(
            float(value.detach()[token]), math.log(shares[label] / total), abs_tol=1e-12
        )
        for v, share in shares.items():
            expected[token, v] = weights[token] * ((v == label) - share / total)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-10, atol=1e-14)
