"""The noise of a stress test: the same numbers on a GPU as on the CPU."""

from __future__ import annotations

import torch

from megatron_gspo.routing_replay.router_noise import gaussian_noise, pass_seed, token_seeds


def test_the_noise_is_that_of_the_cpu(device):
    names = torch.tensor([[0, 0], [7, 3], [2**40, 1]])
    counts = torch.tensor([50, 3000, 11])
    segments = torch.repeat_interleave(torch.arange(3), counts)
    positions = torch.cat([torch.arange(int(count)) for count in counts])
    found = []
    for place in ("cpu", device):
        seeds = token_seeds(
            pass_seed(1, 2, "rollout"), names, segments.to(place), positions.to(place)
        )
        found.append([seeds.cpu(), *(gaussian_noise(seeds, layer, 128).cpu() for layer in (0, 47))])
    for expected, noise in zip(*found, strict=True):
        assert torch.equal(expected, noise)
    assert len(found[0][0].unique()) > 3000, "tokens differ"
