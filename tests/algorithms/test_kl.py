import math

import pytest
import torch

from megatron_gspo.algorithms import kl_penalty
from megatron_gspo.algorithms.kl import binary_kl


def test_estimators_of_a_known_kl():
    """Over all tokens of a 5-token vocabulary, weighted by p, k1 and k3 give KL(p || q) exactly."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    kl = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_penalty(p, q, estimator)).sum(), kl)
    assert (kl_penalty(p, q, "k3") >= 0).all() and (kl_penalty(p, q, "k1") < 0).any()
    torch.testing.assert_close(kl_penalty(p, q, "k2"), (p - q) ** 2 / 2)


def test_k2_has_the_gradient_of_the_kl_and_k1_none():
    logits = torch.randn(
        5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    q = torch.randn(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(
        0
    )
    p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    expected = {"k1": torch.zeros(5, dtype=torch.float64), "k2": exact}
    for estimator, gradient in expected.items():
        loss = (p.exp().detach() * kl_penalty(p, q, estimator)).sum()  # as in a loss on samples
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(got, gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_far_tokens_are_finite_and_without_gradient(estimator, far):
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    got = kl_penalty(log_probs, torch.tensor([-1.0 - far, -1.5]), estimator)
    got.sum().backward()
    assert got.isfinite().all() and log_probs.grad[0] == 0 and log_probs.grad[1] > 0


def test_binary_kl_of_a_certain_token():
    """p = 1 and q = 1/2: log 2, with no probability left for other tokens; and the other way round,
    where the 1e-8 of verl keeps it finite."""
    certain = torch.tensor([0.0])
    half = torch.tensor([0.5]).log()
    assert binary_kl(certain, half).tolist() == pytest.approx([math.log(2)])
    other = -0.5 * math.log(2) + 0.5 * math.log((0.5 + 1e-8) / 1e-8)
    assert binary_kl(half, certain).tolist() == pytest.approx([other], rel=1e-6)
