"""One adapter by hand: the rows of each part with its own A, the scale once, the merged weight."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_gspo.mcore.lora.adapter import Adapter, expert_adapters

# Of a weight of 5 rows; 1 and 2 are another tensor's.
ROWS = [torch.tensor([0, 3]), torch.tensor([4])]


def make(scale: float = 0.5) -> tuple[torch.Tensor, Adapter]:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=g)
    adapter = Adapter(weight, 2, scale, ROWS)
    with torch.no_grad():
        adapter.lora_A.normal_(generator=g)
        for rows in ROWS:
            adapter.lora_B[rows] = torch.randn(len(rows), 2, generator=g)
    return weight, adapter


def by_loop(weight: torch.Tensor, adapter: Adapter, scale: float) -> torch.Tensor:
    merged = weight.clone()
    for part, rows in enumerate(ROWS):
        for row in rows.tolist():
            for column in range(3):
                for r in range(2):
                    merged[row, column] += (
                        scale * adapter.lora_B[row, r] * adapter.lora_A[2 * part + r, column]
                    )
    return merged


def test_the_product_and_the_merged_weight_are_those_of_a_loop():
    weight, adapter = make()
    expected = by_loop(weight, adapter, 0.5)
    a, b = adapter()
    assert torch.allclose(weight + b @ a, expected, atol=1e-6)
    assert torch.allclose(adapter.merged(weight), expected, atol=1e-6)
    assert torch.equal(adapter.merged(weight)[1:3], weight[1:3])


def test_rows_without_an_adapter_get_no_gradient():
    _, adapter = make()
    a, b = adapter()
    (b @ a).square().sum().backward()
    assert adapter.lora_B.grad[[0, 3, 4]].abs().min() > 0 and not adapter.lora_B.grad[[1, 2]].any()


def test_a_new_adapter_changes_nothing():
    weight = torch.ones(5, 3)
    adapter = Adapter(weight, 2, 3.0, [torch.arange(5)])
    assert torch.equal(adapter.merged(weight), weight) and adapter.rows_of_part is None


def test_experts_adapters_one_by_one():
    linears = [SimpleNamespace(lora=make(scale)[1]) for scale in (0.5, 0.5)]
    found = expert_adapters(linears)
    for i, linear in enumerate(linears):
        a, b = linear.lora()
        assert torch.equal(found.a[i], a) and torch.equal(found.b[i], b)
    linears[0].lora.enabled = False
    assert expert_adapters(linears) is None and expert_adapters([SimpleNamespace()]) is None
