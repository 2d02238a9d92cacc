"""The noise of examples/collapse: the same numbers on a GPU as on the CPU."""

from __future__ import annotations

import torch

from megatron_gspo.routing_replay.perturbation import RoutedTokens
from tests.support.collapse_noise import example_module


def test_the_noise_is_that_of_the_cpu(device):
    names = torch.tensor([[0, 0], [7, 3], [2**40, 1]])
    counts = torch.tensor([50, 3000, 11])
    segments = torch.repeat_interleave(torch.arange(3), counts)
    positions = torch.cat([torch.arange(int(count)) for count in counts])
    found = []
    example = example_module("noise", "noise")
    for place in ("cpu", device):
        tokens = RoutedTokens.of(names.to(place), segments.to(place), positions.to(place))
        seeds = example.token_seeds(example.pass_seed(1, 2, "rollout"), tokens)
        numbers = [example.gaussian_noise(seeds, layer, 128).cpu() for layer in (0, 47)]
        found.append([seeds.cpu(), *numbers])
    for expected, noise in zip(*found, strict=True):
        assert torch.equal(expected, noise)
    assert len(found[0][0].unique()) > 3000, "tokens differ"
