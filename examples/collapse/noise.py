"""Random changes of the routers' choices, for stress tests: engines with other kernels, routers
that move.

Experts are chosen by ``logits + strength * std(logits) * gaussian``. The noise is a function of a
token's identity (sequence and position), the pass, the layer and the expert. So it is the same in
every parallel layout, packing, micro-batch and recomputation, and differs between passes.

routing:
  perturbation: examples/collapse/noise.py:noise
  perturbation_options: {strength: 0.5}
callbacks: [examples/collapse/study.py:NoiseStudy]
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.routing_replay.perturbation import RoutedTokens, RouterTerms

_WORD = 0xFFFFFFFF
_TABLE_BITS = 16


def noise(
    terms: RouterTerms,
    *,
    strength: float,
    engines: str = "both",
    perturb_weights: bool = False,
    seed: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The logits with noise, which choose the experts; the live router's weigh them.

    strength: standard deviation of the noise over that of a token's logits. engines: `rollout`,
    `trainer` or `both`. perturb_weights: weigh the experts by the noisy logits too. seed: of the
    noise alone.
    """
    if engines not in ("rollout", "trainer", "both"):
        raise ValueError(f"engines = {engines!r}: must be rollout, trainer or both")
    if engines not in (terms.engine, "both"):
        return terms.logits
    seeds = token_seeds(_seed_of_pass(terms, seed), terms.tokens)
    noisy = perturb(terms.logits, seeds, terms.layer, strength)
    return (noisy, noisy) if perturb_weights else noisy


def _seed_of_pass(terms: RouterTerms, seed: int) -> int:
    if terms.engine == "rollout":
        return pass_seed(pass_seed(seed, "rollout"), terms.seed)
    return pass_seed(pass_seed(seed, terms.seed, terms.step), terms.phase)


@cache
def pass_seed(*parts: int | str) -> int:
    """A 32-bit seed for one pass: for example of the run's seed, the step and the name of the
    pass.
    """
    words = [
        int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in parts
    ]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def token_seeds(seed: int, tokens: RoutedTokens) -> Tensor:
    """A seed for each token, int64 ``[t]`` of 31-bit values."""
    prompts = tokens.prompts
    starts = _mix(_mix(prompts & _WORD ^ seed) ^ (prompts >> 32 & _WORD))
    starts = _mix(starts ^ (tokens.samples & _WORD))
    return _mix(starts ^ tokens.positions) >> 1


def gaussian_noise(seeds: Tensor, layer: int, num_experts: int) -> Tensor:
    """Standard normal numbers, float32 ``[t, num_experts]``, from integer seeds ``[t]`` of tokens.

    Normal quantiles are read from a table of 65,536, so that the numbers are the same on every
    device.
    """
    experts = torch.arange(num_experts, device=seeds.device)
    words = _mix(_mix(seeds.long() ^ (layer + 1))[:, None] ^ (experts + 1))
    return _normal_quantiles(str(seeds.device))[words >> (32 - _TABLE_BITS)]


def perturb(logits: Tensor, seeds: Tensor, layer: int, strength: float) -> Tensor:
    """``logits + strength * std * gaussian``, ``[t, E]`` of at least float32; std: of each token's
    logits. Without gradient through the noise."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    std = values.detach().std(-1, keepdim=True)
    return values + strength * std * gaussian_noise(seeds, layer, logits.shape[-1])


def _mix(words: Tensor) -> Tensor:
    """A bijection of 32-bit words held in int64 (Wellons' lowbias32): every input bit changes
    half of the output's.
    """
    words = (words ^ words >> 16) * 0x7FEB352D & _WORD
    words = (words ^ words >> 15) * 0x846CA68B & _WORD
    return words ^ words >> 16


@cache
def _normal_quantiles(device: str) -> Tensor:
    middles = (torch.arange(2**_TABLE_BITS, dtype=torch.float64) + 0.5) / 2**_TABLE_BITS
    return torch.special.ndtri(middles).float().to(device)
