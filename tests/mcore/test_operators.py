"""Our operators against their composite forms: values, and gradients by autograd of the
composite, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.expert_products import GroupedProducts, LoopedProducts
from megatron_gspo.mcore.gated_units import SWIGLU, ClampedGLU, GatedUnit
from megatron_gspo.mcore.operators import (
    ExpertWeights,
    LowRank,
    _GatedExperts,
    gated_experts,
    rms_norm,
)
from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def assert_same(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients of a weighted sum (weights that no symmetry hides)."""
    assert torch.allclose(ours, expected, atol=1e-12, rtol=0)
    weights = draw(*expected.shape, seed=9).detach()
    pairs = zip(
        *(torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, expected)),
        strict=True,
    )
    for value, wanted in pairs:
        assert torch.allclose(value, wanted, atol=1e-11, rtol=0)


def test_rms_norm_of_low_precision_is_torchs():
    x = draw(4, 8).bfloat16()
    weight = draw(8, seed=1).bfloat16()
    assert torch.equal(
        rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    )


# all experts busy, idle ones first, between and last, one expert, one row, no row
COUNTS = [[4, 3, 5], [0, 12, 0], [12, 0, 0], [5, 0, 7], [12], [0, 1, 0], [0, 0]]


CLAMPED = ClampedGLU(limit=0.7)


def experts_of(
    counts: list[int], h: int = 6, f: int = 4, *, biases: bool = False, rank: int = 0
) -> list[Tensor]:
    """Rows, probabilities and, expert after expert, the weights up and down, their biases, and
    adapters of ``rank``, in float64."""
    n = sum(counts)
    sizes = [(2 * f, h), (h, f)] + [(2 * f,), (h,)] * biases
    sizes += [(rank, h), (2 * f, rank), (rank, f), (h, rank)] * (rank > 0)
    scale = [1.0] * (len(sizes) - 4 * (rank > 0)) + [
        0.3
    ] * 4  # what adapters add is smaller than the weights
    weights = [
        (draw(*size, seed=2 + 10 * kind + i).detach() * scale[kind]).requires_grad_()
        for kind, size in enumerate(sizes)
        for i in range(len(counts))
    ]
    return [draw(n, h), draw(n, seed=1), *weights]


def weights_of(tensors: list[Tensor], counts: list[int], share: float = 1.0) -> ExpertWeights:
    parts = [tensors[2 + i : 2 + i + len(counts)] for i in range(0, len(tensors) - 2, len(counts))]
    up, down, *rest = parts
    biases, adapters = (rest[:2], rest[2:]) if rest and rest[0][0].dim() == 1 else ([(), ()], rest)
    low = [LowRank(*adapters[:2]), LowRank(*adapters[2:])] if adapters else [None, None]
    return ExpertWeights(up, down, *biases, *low, down_bias_share=share)


def experts_one_by_one(
    tensors: list[Tensor], counts: list[int], unit: GatedUnit = SWIGLU, share: float = 1.0
) -> Tensor:
    x, probs, parts, weights = *tensors[:2], [], weights_of(tensors, counts)
    for e, (tokens, p) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        up, down = (
            weight[e] if low is None else weight[e] + low.b[e] @ low.a[e]
            for weight, low in (
                (weights.up, weights.up_adapter),
                (weights.down, weights.down_adapter),
            )
        )
        hidden = tokens @ up.t() + (weights.up_bias[e] if weights.up_bias else 0)
        gate, linear = hidden.chunk(2, dim=1)
        if unit is SWIGLU:
            made = torch.sigmoid(gate) * gate * linear
        else:
            gate = torch.where(gate > 0.7, 0.7, gate)
            linear = torch.where(linear.abs() > 0.7, 0.7 * linear.sign(), linear)
            made = torch.sigmoid(1.702 * gate) * gate * (linear + 1)
        out = made @ down.t() + (weights.down_bias[e] * share if weights.down_bias else 0)
        parts.append(out * p[:, None])
    return torch.cat(parts)


KINDS = {
    "swiglu": (SWIGLU, False, 0),
    "clamped, biases": (CLAMPED, True, 0),
    "adapters": (SWIGLU, False, 3),
}


@pytest.mark.parametrize(
    "unit, biases, rank", [*KINDS.values(), (CLAMPED, True, 3)], ids=[*KINDS, "all"]
)
@pytest.mark.parametrize("counts", COUNTS)
def test_experts(counts, unit, biases, rank):
    tensors = experts_of(counts, biases=biases, rank=rank)
    expected = experts_one_by_one(tensors, counts, unit)
    outputs = gated_experts(*tensors[:2], torch.tensor(counts), weights_of(tensors, counts), unit)
    assert_same(outputs, expected, tensors)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_experts_copy_tokens_again_for_the_backward_pass(rank, last_first):
    """The same bits as with copies that are made before, which are kept."""
    routing_map = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    copies = TokenCopies.of(routing_map, 6, most=2, last_first=last_first)
    counts = routing_map.sum(0).flip(0) if last_first else routing_map.sum(0)
    _, probs, *weights = experts_of(counts.tolist(), rank=rank)
    tokens = draw(3, 6)
    inputs = [tokens, probs, *weights]
    kept: list[Tensor] = []

    def run(rows: Tensor, copies: TokenCopies | None) -> list[Tensor]:
        experts = weights_of(inputs, counts.tolist())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            out = gated_experts(rows, probs, counts, experts, copies=copies)
        return results(out, inputs)

    expected = run(copy_tokens(tokens, copies), None)
    assert any(tensor.shape == (6, 6) for tensor in kept)
    kept.clear()
    ours = run(tokens, copies)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert any(tensor is tokens for tensor in kept)
    assert not any(tensor.shape == (6, 6) for tensor in kept)


def test_frozen_weights_get_no_gradient_and_cost_no_product(monkeypatch):
    counts = [4, 0, 5]
    made = []
    tensors = experts_of(counts, rank=3)
    weights = weights_of(tensors, counts)
    for weight in (*weights.up, *weights.down):
        weight.requires_grad_(False)
    monkeypatch.setattr(
        LoopedProducts,
        "weight_gradients",
        lambda self, g, x: (
            made.append(g)
            or [a.t() @ b for a, b in zip(g.split(self.counts), x.split(self.counts), strict=True)]
        ),
    )
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    outputs = gated_experts(*tensors[:2], torch.tensor(counts), weights)
    assert_same(outputs, experts_one_by_one(tensors, counts), trained)
    assert len(made) == 4, "one for each matrix of the adapters"


def results(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The values of ``y`` and the gradients of a weighted sum of them, in float64."""
    gradients = torch.autograd.grad((y * draw(*y.shape, seed=9).detach().to(y.dtype)).sum(), inputs)
    return [x.detach().double() for x in (y, *gradients)]


@pytest.mark.parametrize("unit, biases, rank", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)])
def test_grouped_products_are_those_of_the_loop(counts, unit, biases, rank):
    """In bfloat16, which the kernel needs: near float64, and nearer to the loop in bfloat16."""
    tensors = experts_of(counts, h=32, f=16, biases=biases, rank=8 * (rank > 0))
    low = [t.detach().bfloat16().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in low]
    expected = results(experts_one_by_one(exact, counts, unit), exact)
    sizes = torch.tensor(counts)
    grouped = GroupedProducts.of(sizes)
    looped = LoopedProducts(counts)
    weights = weights_of(low, counts)
    grouped_found, looped_found = (
        results(
            _GatedExperts.apply(
                *low[:2], products, unit, None, weights.structure(), *weights.tensors()
            ),
            low,
        )
        for products in (grouped, looped)
    )
    for a, b, truth in zip(grouped_found, looped_found, expected, strict=True):
        scale = float(truth.abs().max())
        assert float((a - truth).abs().max()) <= 0.03 * scale
        assert float((a - b).abs().max()) <= 0.01 * scale


def test_experts_that_the_kernel_leaves_out_get_zeros(monkeypatch):
    counts = torch.tensor([2, 0, 3])
    grad = draw(5, 16).detach().bfloat16()
    rows = draw(5, 32, seed=1).detach().bfloat16()
    products = GroupedProducts.of(counts)
    expected = products.weight_gradients(grad, rows)
    kernel = torch.nn.functional.grouped_mm

    def leaves_out(*args: Tensor, **kwargs: Tensor) -> Tensor:
        result = kernel(*args, **kwargs)
        result[1] = float("nan")
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_out)
    actual = GroupedProducts(products.offsets, counts == 0).weight_gradients(grad, rows)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert products.weight_gradients(grad, rows)[1].isnan().all()
