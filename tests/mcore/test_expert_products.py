"""Products of experts one after the other, by hand; the grouped kernel is compared in test_operators.py."""

from __future__ import annotations

import torch

from megatron_gspo.mcore.expert_products import LoopedProducts


def test_looped_products():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = [torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([[0.0, 1.0]])]
    products = LoopedProducts([2, 0, 1])
    assert products.rows_by_weights(rows, weights, transpose=True).tolist() == [[1.0], [3.0], [6.0]]
    grad = torch.tensor([[1.0], [2.0], [3.0]])
    back = products.rows_by_weights(grad, weights, transpose=False)
    assert back.tolist() == [[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]
    assert [g.tolist() for g in products.weight_gradients(grad, rows)] == [[[7.0, 10.0]], [[0.0, 0.0]], [[15.0, 18.0]]]
    assert [s.tolist() for s in products.sums(rows)] == [[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]]
    assert products.rows_of([rows[0], rows[1], rows[2]], 3).tolist() == [[1.0, 2.0], [1.0, 2.0], [5.0, 6.0]]
