"""Noise of the routers: a function of the token, the pass, the layer and the expert alone."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from megatron_gspo.routing_replay.router_noise import (
    gaussian_noise,
    pass_seed,
    perturb,
    token_seeds,
)

SEQUENCES = [(3, 0), (3, 1), (2**40 + 3, 0)]


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def naive(seed: int, sequence: tuple[int, int], position: int, layer: int, expert: int) -> float:
    prompt, sample = sequence
    word = lowbias32(lowbias32(prompt % 2**32 ^ seed) ^ prompt >> 32)
    word = lowbias32(lowbias32(word ^ sample) ^ position) >> 1
    word = lowbias32(lowbias32(word ^ (layer + 1)) ^ (expert + 1))
    return NormalDist().inv_cdf((word // 2**16 + 0.5) / 2**16)


def test_each_number_is_that_of_a_naive_loop():
    seeds = token_seeds(77, SEQUENCES, torch.tensor([0, 1, 2, 2]), torch.tensor([0, 5, 5, 6]))
    noise = gaussian_noise(seeds, layer=3, num_experts=4)
    wanted = [
        [naive(77, SEQUENCES[s], p, 3, e) for e in range(4)]
        for s, p in [(0, 0), (1, 5), (2, 5), (2, 6)]
    ]
    np.testing.assert_allclose(noise.numpy(), wanted, rtol=1e-6, atol=1e-6)


def test_a_token_has_the_same_noise_in_any_packing():
    segments = torch.tensor([0, 0, 1, 1, 1, 2])
    positions = torch.tensor([0, 1, 0, 1, 2, 0])
    whole = gaussian_noise(token_seeds(5, SEQUENCES, segments, positions), 0, 8)
    order = torch.tensor([4, 0, 5])
    part = gaussian_noise(
        token_seeds(5, SEQUENCES[::-1], 2 - segments[order], positions[order]), 0, 8
    )
    torch.testing.assert_close(part, whole[order], rtol=0, atol=0)


@pytest.mark.parametrize("change", ["seed", "layer", "prompt", "high word", "sample", "position"])
def test_everything_else_gives_other_noise(change):
    here = torch.zeros(500, dtype=torch.int64)
    there = torch.arange(500)

    def noise(seed=1, layer=0, sequence=(0, 0), positions=there):
        return gaussian_noise(token_seeds(seed, [sequence], here, positions), layer, 16).flatten()

    other = {
        "seed": lambda: noise(seed=2),
        "layer": lambda: noise(layer=1),
        "prompt": lambda: noise(sequence=(1, 0)),
        "high word": lambda: noise(sequence=(2**32, 0)),
        "sample": lambda: noise(sequence=(0, 1)),
        "position": lambda: noise(positions=there + 1),
    }[change]()
    assert abs(np.corrcoef(noise(), other)[0, 1]) < 5 / math.sqrt(8000)


def test_the_noise_is_standard_normal():
    seeds = token_seeds(9, [(0, 0)], torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000))
    noise = gaussian_noise(seeds, 0, 16).double()
    assert abs(noise.mean()) < 5 / math.sqrt(noise.numel()) and abs(noise.var() - 1) < 0.02
    for bound in (0.5, 1.0, 2.0, 3.0):
        assert abs((noise < bound).double().mean() - NormalDist().cdf(bound)) < 0.004
    neighbours = np.corrcoef(noise.numpy().T)  # experts of one token
    assert np.abs(neighbours - np.eye(16)).max() < 0.04


def test_the_noise_scales_with_the_spread_of_a_tokens_logits():
    logits = torch.tensor(
        [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=torch.bfloat16, requires_grad=True
    )
    seeds = torch.tensor([11, 11])
    changed = perturb(logits, seeds, 0, strength=0.5)
    change = (changed - logits.float()).detach()
    gaussian = gaussian_noise(seeds, 0, 3)
    torch.testing.assert_close(
        change, 0.5 * torch.tensor([[1.0], [10.0]]) * gaussian, rtol=1e-5, atol=1e-5
    )
    changed.sum().backward()
    assert (logits.grad == 1).all(), "no gradient through the spread"


def test_the_seed_of_a_pass():
    assert pass_seed(1, 2, "update 0") == pass_seed(1, 2, "update 0")
    found = {
        pass_seed(*parts)
        for parts in [(1, 2, "old"), (2, 1, "old"), (1, 2, "rollout"), (1, 3, "old")]
    }
    assert len(found) == 4 and all(0 <= seed < 2**32 for seed in found)
