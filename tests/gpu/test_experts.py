"""One layer of experts, its router and its permutation against a loop over tokens' experts in
float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.expert_products import GroupedProducts, stacked
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.model import build_model
from megatron_gspo.models import family_of, read_config
from tests.gpu.errors import check, relative
from tests.gpu.tolerances import BACKWARD, tolerance, unit_roundoff
from tests.support.configs import model_config, parallel
from tests.support.tiny_models import tiny_config

ROUNDINGS, PRODUCTS = 6, 2  # two products, activation, gate, weight of an expert, sum over experts
UNUSED = 3  # an expert that no token chooses


def naive_experts(x: Tensor, weights: dict[str, Tensor], k: int) -> Tensor:
    """[t, h]: each token's k best experts, weighed by the softmax of their logits."""
    values, ids = (x @ weights["gate.weight"].t()).topk(k)
    probs = values.softmax(-1)
    output = torch.zeros_like(x)
    for expert in range(len(weights["gate.weight"])):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (
            weights[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        inner = torch.nn.functional.silu(x[tokens] @ gate.t()) * (x[tokens] @ up.t())
        output = output.index_add(0, tokens, probs[tokens, places, None] * (inner @ down.t()))
    return output


def gaps(x: Tensor, router: Tensor, k: int) -> Tensor:
    """[t]: by how much a token's k-th best expert is better than the next one; rounding swaps
    those that are equal.
    """
    values = (x.double() @ router.detach().double().cpu().t()).topk(k + 1).values
    return values[:, k - 1] - values[:, k]


def tensors_of(chunk: Any, path: str, groups: Any, value: Any) -> dict[str, Tensor]:
    """``value`` of each parameter of the first layer's experts and router, by the end of its
    Hugging Face name.
    """
    family, shape = family_of(read_config(path))
    prefix = "model.layers.0.mlp."
    exported = export_weights([chunk], family, shape, groups, value=value)
    return {
        name.removeprefix(prefix): v.double().cpu()
        for name, v in exported
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_and_gradients(
    device, groups, sizes, implementation, dtype, tmp_path, record_property
):
    tiny_config(**{**sizes.model, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    _, shape = family_of(read_config(tmp_path))
    torch.manual_seed(0)
    [chunk] = build_model(
        shape, parallel(), model_config(dtype=dtype, implementation=implementation), groups
    )
    layer = chunk.decoder.layers[0].mlp
    with torch.no_grad():
        layer.router.weight[UNUSED, 0] = -50.0
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sizes.tokens, shape.hidden_size, generator=g).to(getattr(torch, dtype))
    x[:, 0] = 1.0
    margin = 64 * unit_roundoff("float32", device, implementation)
    x = x[gaps(x, layer.router.weight, shape.experts_per_token) > margin]
    assert len(x) > sizes.tokens / 2
    inputs = x.to(device)[:, None].requires_grad_()
    output, _ = layer(inputs)
    weights = torch.randn(output.shape, generator=g)
    (output.float() * weights.to(device)).sum().backward()

    leaves = {
        name: v.requires_grad_()
        for name, v in tensors_of(chunk, tmp_path, groups, lambda p: p.detach()).items()
    }
    exact = x.double().requires_grad_()
    expected = naive_experts(exact, leaves, shape.experts_per_token)
    (expected * weights[:, 0].double()).sum().backward()

    terms = PRODUCTS * max(shape.hidden_size, sizes.tokens) if dtype == "float32" else 0
    allowed = tolerance(unit_roundoff(dtype, device, implementation), ROUNDINGS + terms)
    assert relative(output[:, 0], expected) < allowed
    actual = tensors_of(
        chunk, tmp_path, groups, lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    )
    unused = {name for name, leaf in leaves.items() if not leaf.grad.norm()}
    assert unused == {name for name in leaves if f"experts.{UNUSED}." in name}
    assert not any(actual[name].any() for name in unused)
    errors = {
        name: relative(actual[name], leaf.grad)
        for name, leaf in leaves.items()
        if name not in unused
    }
    errors["inputs"] = relative(inputs.grad[:, 0], exact.grad)
    check(record_property, errors, math.sqrt(BACKWARD) * allowed)


@pytest.mark.parametrize("transpose", [False, True])
def test_weights_are_multiplied_where_they_lie_as_their_copies_are(device, transpose):
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([40, 0, 24, 64])
    # of an expert two weights, as in Megatron's parameter buffer
    buffer = torch.randn(4, 2, 128, 64, generator=g).bfloat16().to(device)
    rows = torch.randn(128, 64 if transpose else 128, generator=g).bfloat16().to(device)
    weights = list(buffer[:, 1])
    assert stacked(weights).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    products = GroupedProducts.of(counts.to(device))
    copies = [weight.clone() for weight in weights]
    assert torch.equal(
        products.rows_by_weights(rows, weights, transpose=transpose),
        products.rows_by_weights(rows, copies, transpose=transpose),
    )
