"""The log-prob head against all logits in float64, and its memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.log_prob_worker import peak_bytes
from megatron_gspo.parallel.log_probs import CHUNK_BYTES, LogProbOptions, log_probs_from_hidden
from tests.gpu.errors import check, relative, relative_to_spread
from tests.gpu.tolerances import BITS, tolerance

WIDTH = 256
TEMPERATURE = 0.7
PADDING = 5


def make_inputs(
    device: str, dtype: str, tokens: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the output weight with rows of padding, labels; logits of standard
    deviation 1.6.
    """
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=g).to(getattr(torch, dtype))
    weight = (
        torch.randn(vocabulary + PADDING, WIDTH, generator=g).mul_(0.1).to(getattr(torch, dtype))
    )
    labels = torch.randint(vocabulary, (tokens,), generator=g)
    return hidden.to(device), weight.to(device), labels.to(device)


def loss_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(log_probs), device=log_probs.device, dtype=log_probs.dtype)
    return (weights * log_probs).mean() + 0.1 * (weights * entropy).mean()


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(hidden @ weight[:-PADDING].t() / TEMPERATURE, -1)
    return log_softmax.gather(1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_entropies_and_gradients(device, sizes, dtype, record_property):
    hidden, weight, labels = make_inputs(device, dtype, sizes.tokens, sizes.vocabulary)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    wanted = naive(*exact, labels)
    loss_of(*wanted).backward()
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    options = LogProbOptions(TEMPERATURE, sizes.vocabulary, with_entropy=True)
    outputs = log_probs_from_hidden(*leaves, labels, options)
    loss_of(*outputs).backward()

    # Both dtypes are multiplied into float32: sums of WIDTH products, then over the vocabulary.
    single = tolerance(2.0 ** -BITS["float32"], WIDTH + sizes.vocabulary)
    # d loss / d logits is rounded to bfloat16 before its products, and so is the gradient that they
    # give.
    low = tolerance(2.0 ** -BITS["bfloat16"], 2) if dtype == "bfloat16" else 0.0
    assert {value.dtype for value in outputs} == {torch.float32}
    assert relative_to_spread(outputs[0], wanted[0]) < single
    assert relative_to_spread(outputs[1], wanted[1]) < single
    errors = {
        name: relative(leaf.grad, reference.grad)
        for name, leaf, reference in zip(("hidden", "weight"), leaves, exact, strict=True)
    }
    check(record_property, errors, single * math.sqrt(2) + low)
    assert not leaves[1].grad[-PADDING:].any(), "rows of padding"


def test_memory_is_that_of_a_tile_and_the_gradients(device, sizes):
    """Not of [tokens, vocabulary] in float32, of which naive code has several."""
    tokens = 8 * sizes.tokens
    hidden, weight, labels = make_inputs(device, "bfloat16", tokens, sizes.vocabulary)
    budget = 2**15 if device == "cpu" else CHUNK_BYTES["cuda"]
    options = LogProbOptions(TEMPERATURE, sizes.vocabulary, with_entropy=True, chunk_bytes=budget)

    def run() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
        loss_of(*log_probs_from_hidden(*leaves, labels, options)).backward()

    peak, _ = peak_bytes(run, device)
    # gradients in their own dtype and in float32; two dozen numbers a token besides statistics of
    # each tile
    gradients = sum(tensor.numel() * (tensor.element_size() + 4) for tensor in (hidden, weight))
    copies = sum(tensor.numel() * 4 for tensor in (hidden, weight)) if device == "cpu" else 0
    assert peak < budget + gradients + copies + 4 * tokens * 64
    assert device == "cpu" or peak < 4 * tokens * sizes.vocabulary / 4
