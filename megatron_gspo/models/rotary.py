"""Rotary embeddings as plain data, and their frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """Frequencies stretched for longer sequences (Peng et al., arXiv:2309.00071, section 3)."""

    factor: float
    """How many times longer sequences may be."""

    trained_length: int
    """Positions before the stretch."""

    fast: float = 32.0
    """A frequency with more rotations over `trained_length` positions stays."""

    slow: float = 1.0
    """A frequency with fewer rotations over them is divided by `factor`."""

    rounds: bool = True
    """Whether the dimensions between the two are rounded to integers."""

    cosine_scale: float = 1.0
    """Factor on cosines and sines."""

    score_scale: float = 1.0
    """Factor on the attention scores."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings."""

    base: float
    dim: int
    """How many dimensions of a head are rotated, its first ones; 0: none are, and attention knows no
    positions but by its mask."""

    interleaved: bool = False
    """Pairs are (2 i, 2 i + 1) and not (i, i + dim / 2); the rotated ones have all first elements
    before all second ones."""

    yarn: Yarn | None = None

    @property
    def cosine_scale(self) -> float:
        return 1.0 if self.yarn is None else self.yarn.cosine_scale

    @property
    def score_scale(self) -> float:
        return 1.0 if self.yarn is None else self.yarn.score_scale

    def frequencies(self) -> Tensor:
        """Radians per position of each pair, float32 [dim / 2].

        In float32 like those of Transformers.
        """
        import torch  # not at the top: configs are read without it

        plain = 1.0 / self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.yarn is None:
            return plain
        low, high = self._ramp(self.yarn)
        share = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(
            0, 1
        )
        return plain / self.yarn.factor * share + plain * (1 - share)

    def _ramp(self, yarn: Yarn) -> tuple[float, float]:
        """The pairs at which frequencies begin to be divided by the factor, and from which all
        are.
        """

        def pair(rotations: float) -> float:
            """The pair that makes so many rotations over the trained positions."""
            return (
                self.dim
                * math.log(yarn.trained_length / (rotations * 2 * math.pi))
                / (2 * math.log(self.base))
            )

        low = pair(yarn.fast)
        high = pair(yarn.slow)
        if yarn.rounds:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.dim - 1)
        return low, high if high != low else high + 0.001


NO_ROTARY = Rotary(base=10000.0, dim=0)
"""Of models whose attention has no rotary embedding."""
