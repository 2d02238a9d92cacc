"""Noise of the routers: a function of the token, the pass, the layer and the expert alone."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from megatron_gspo.config import RoutingConfig
from megatron_gspo.routing_replay.perturbation import (
    PerturbedPass,
    RoutedTokens,
    load_perturbation,
)
from megatron_gspo.user_code import UserCodeError
from tests.support.collapse_noise import example_module, noise_of, noise_section

noise_file = example_module("noise", "noise")
gaussian_noise = noise_file.gaussian_noise
pass_seed = noise_file.pass_seed
perturb = noise_file.perturb
SEQUENCES = [(3, 0), (3, 1), (2**40 + 3, 0)]


def token_seeds(seed, sequences, segments, positions):
    tokens = RoutedTokens.of(torch.tensor(sequences), segments, positions)
    return noise_file.token_seeds(seed, tokens)


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
    seeds = {
        pass_seed(*parts)
        for parts in [(1, 2, "old"), (2, 1, "old"), (1, 2, "rollout"), (1, 3, "old")]
    }
    assert len(seeds) == 4 and all(0 <= seed < 2**32 for seed in seeds)


def test_the_passes_have_noise_of_their_own():
    """The trainer's alone where the engine's is not asked for."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    tokens = RoutedTokens(*torch.zeros(2, 6, dtype=torch.int64), torch.arange(6))

    def changed(engine: str, *where, phase: str = "", **options):
        made = PerturbedPass(noise_of(strength=0.5, **options), engine, *where, phase=phase)
        return made(logits, 0, tokens)

    passes = [
        changed(engine, *where, phase=phase)[0]
        for engine, where, phase in [
            ("rollout", (1,), ""),
            ("rollout", (2,), ""),
            ("trainer", (1, 0), "old policy"),
            ("trainer", (1, 1), "old policy"),
            ("trainer", (1, 0), "update 0"),
        ]
    ]
    assert len({tuple(values.flatten().tolist()) for values in [logits, *passes]}) == 6
    by_hand = perturb(
        logits,
        noise_file.token_seeds(pass_seed(pass_seed(3, 1, 4), "update 0"), tokens),
        layer=0,
        strength=0.5,
    )
    chosen_by, weighed_by = changed("trainer", 1, 4, phase="update 0", seed=3)
    assert torch.equal(chosen_by, by_hand) and weighed_by is logits
    both = changed("trainer", 1, 4, phase="update 0", seed=3, perturb_weights=True)
    assert torch.equal(both[0], by_hand) and torch.equal(both[1], by_hand)
    assert changed("rollout", 1, engines="trainer") == (logits, logits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "missing 1 required keyword-only argument: 'strength'"),
        (
            {"strength": 0.5, "engines": "none"},
            "engines = 'none': must be rollout, trainer or both",
        ),
        ({"strenght": 0.5}, "unexpected keyword argument 'strenght'"),
    ],
)
def test_wrong_options_are_refused_before_a_run(options, words):
    with pytest.raises(UserCodeError, match=words):
        load_perturbation(RoutingConfig(**noise_section(**options)))
