"""The record of allocations has what a graph in C++ holds, and nothing that existed before."""

from __future__ import annotations

import torch

from tests.support.live_storages import LiveStorages


def test_what_a_graph_holds_is_alive_until_the_graph_is_gone():
    weight = torch.ones(8, requires_grad=True)
    with LiveStorages() as storages:
        product = (weight * 2).exp().sum()
    assert [size for size, _ in storages.alive()] == [32, 4], "the result of exp, saved for backward, and the sum"
    product.backward()
    del product
    assert storages.alive() == []
    assert storages.allocated == 32 + 32 + 4


def test_results_in_place_and_views_are_not_new():
    with LiveStorages() as storages:
        values = torch.ones(4)
        values.add_(1).view(2, 2)
    assert [name.split()[0] for _, name in storages.alive()] == ["ones"]
