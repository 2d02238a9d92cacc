"""Router logits and their gradients, near float64 as products in float32 are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore import router
from megatron_gspo.mcore.router import _bfloat16_terms, router_logits

# Of sums in float32, relative to the largest value; TF32 rounds factors to 2^-11.
FLOAT32 = 2e-6
BFLOAT16 = 2.0**-8


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_three_terms_are_the_number():
    x = draw(40, 12, seed=0) * 10.0 ** torch.arange(-6, 6)
    x[0] = 1 + torch.arange(12) * 2.0**-23
    terms = _bfloat16_terms(x)
    assert terms.dtype == torch.bfloat16 and terms.shape == (40, 36)
    assert torch.equal(terms.double().view(40, 3, 12).sum(1), x.double())


@pytest.mark.parametrize("tokens", [1, 7, 65])
def test_values_and_gradients(tokens, monkeypatch):
    # a CPU has no product of bfloat16 with a float32 result
    monkeypatch.setattr(router, "_float32_product", lambda a, b: a.float() @ b.float())
    x = draw(tokens, 48, seed=0).bfloat16().requires_grad_()
    weight = draw(9, 48, seed=1).bfloat16().requires_grad_()
    grad = draw(tokens, 9, seed=2)
    logits = router_logits(x, weight)
    gradients = torch.autograd.grad(logits, (x, weight), grad)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = exact_inputs[0] @ exact_inputs[1].t()
    exact_gradients = torch.autograd.grad(exact, exact_inputs, grad.double())
    assert logits.dtype == torch.float32
    error = (logits.double() - exact).abs().max()
    assert error <= FLOAT32 * exact.abs().max()
    for ours, expected in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        allowed = BFLOAT16 * expected.abs() + FLOAT32 * expected.abs().max()
        assert bool(((ours.double() - expected).abs() <= allowed).all())
