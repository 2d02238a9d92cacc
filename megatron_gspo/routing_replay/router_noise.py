"""Random changes of the routers' choices, for stress tests: engines with other kernels, routers
that move.

Experts are chosen by ``logits + strength * std(logits) * gaussian``. The noise is a function of a
token's identity (sequence and position), the pass, the layer and the expert. So it is the same in
every parallel layout, packing, micro-batch and recomputation, and differs between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_TABLE_BITS = 16


@dataclass(frozen=True)
class RouterNoise:
    """The noise of one pass.

    strength: standard deviation in units of the standard deviation of a token's logits. seed: of
    this pass (``pass_seed``). perturb_weights: weigh the experts by the perturbed logits too, not
    only choose them.
    """

    strength: float
    seed: int
    perturb_weights: bool = False


def pass_seed(*parts: int | str) -> int:
    """A 32-bit seed for one pass: for example of the run's seed, the step and the name of the
    pass.
    """
    words = [
        int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in parts
    ]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def token_seeds(
    seed: int, sequences: Sequence[tuple[int, int]] | Tensor, segments: Tensor, positions: Tensor
) -> Tensor:
    """A seed for each token, int64 ``[t]`` of 31-bit values, on the device of ``segments``.

    sequences: (prompt_index, sample_index) of each sequence, ``[n, 2]``. segments, positions: int64
    ``[t]``, the sequence of each token and its position in it.
    """
    names = torch.as_tensor(sequences, dtype=torch.int64).to(segments.device)
    starts = _mix(_mix(names[:, 0] & _WORD ^ seed) ^ (names[:, 0] >> 32 & _WORD))
    starts = _mix(starts ^ (names[:, 1] & _WORD))
    return _mix(starts[segments] ^ positions) >> 1


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
