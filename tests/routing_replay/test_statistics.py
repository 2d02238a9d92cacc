"""Router figures: worked cases and a loop that counts experts one by one."""

import math

import pytest
import torch

from megatron_gspo.routing_replay.statistics import expert_load, expert_overlap, router_entropy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_overlap_is_the_size_of_the_intersection(dtype):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(2, 5, 3, 256, generator=g).argsort(-1)[..., :8] for _ in range(2))
    overlap = expert_overlap(a[0].to(dtype), b[0].to(dtype))
    assert overlap.shape == (5, 3)
    for t in range(5):
        for layer in range(3):
            assert overlap[t, layer] == len(
                set(a[0, t, layer].tolist()) & set(b[0, t, layer].tolist())
            )


def test_entropy_by_hand():
    probabilities = torch.tensor(
        [[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 6.0, 0.0]]
    )
    entropy = router_entropy(probabilities)
    wanted = [math.log(4), 0.0, -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))]
    torch.testing.assert_close(entropy, torch.tensor(wanted))


def test_entropy_of_low_precision_is_taken_in_float32():
    probabilities = torch.tensor([[0.3, 0.7]], dtype=torch.bfloat16)
    entropy = router_entropy(probabilities)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, router_entropy(probabilities.float()))


def test_load_counts_each_layer_apart():
    chosen = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 0]], [[3, 1], [1, 0]]], dtype=torch.uint8)
    load = expert_load(chosen, torch.tensor([1.0, 0.5, 0.0]), 4)
    assert load.tolist() == [[1.5, 1.0, 0.5, 0.0], [0.5, 0.0, 1.5, 1.0]]
    assert load.dtype == torch.float32
