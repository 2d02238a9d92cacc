"""The rows of hidden states whose labels are scored, and how tensor-parallel ranks exchange only
these.

Under sequence parallelism a rank holds the hidden states of consecutive tokens. Every rank has the
list of tokens that all ranks score, so each gathers its own scored rows, padded to the largest
number of any rank, without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredRows:
    """Which of t positions are scored. All tensors are int64 and ascending."""

    positions: Tensor
    """[n], the scored positions."""

    own: Tensor
    """[c], the rows of this rank's hidden states that are scored; ``positions`` without sequence
    parallelism."""

    padded: int
    """Rows that each rank passes to the all-gather: its own and padding."""

    gathered: Tensor | None = None
    """[n], the scored rows among the gathered ones, ``padded`` of each rank; None without sequence
    parallelism."""

    @classmethod
    def of(cls, mask: Tensor, rank: int = 0, size: int = 1) -> ScoredRows:
        """The scored rows of ``mask`` [t], nonzero where a position is scored, on the host.

        Args:
            rank, size: in the tensor-parallel group under sequence parallelism, where each rank
                holds t / size rows.
        """
        positions = np.flatnonzero(mask.numpy())
        if size == 1:
            rows = torch.from_numpy(positions)
            return cls(rows, rows, len(positions))
        share = len(mask) // size
        owner = positions // share
        counts = np.bincount(owner, minlength=size)
        padded = int(counts.max())
        column = np.arange(len(positions)) - (np.cumsum(counts) - counts)[owner]
        return cls(
            positions=torch.from_numpy(positions),
            own=torch.from_numpy(positions[owner == rank] - rank * share),
            padded=padded,
            gathered=torch.from_numpy(owner * padded + column),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, to be copied to a device."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ScoredRows:
        """A copy with those of ``tensors``, of any integer type, that ``self.tensors``
        names.
        """
        changed: dict[str, Any] = {name: tensors[name].long() for name in self.tensors()}
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> ScoredRows:
        """A copy with every tensor on ``device``."""
        return self.with_tensors({name: value.to(device) for name, value in self.tensors().items()})

    def select_own(self, hidden: Tensor) -> Tensor:
        """This rank's scored rows of ``hidden`` [t / size, h], with rows of zeros up to
        [padded, h].
        """
        rows = hidden.index_select(0, self.own)
        missing = self.padded - len(self.own)
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows

    def spread_own(self, rows: Tensor, count: int) -> Tensor:
        """The reverse of ``select_own``: ``rows`` [padded, h] in their places among ``count``
        rows, zeros elsewhere.
        """
        return _spread(rows[: len(self.own)], self.own, count)

    def select_gathered(self, rows: Tensor) -> Tensor:
        """The scored rows [n, h] of the gathered ones [size * padded, h]."""
        return rows if self.gathered is None else rows.index_select(0, self.gathered)

    def spread_gathered(self, rows: Tensor, size: int) -> Tensor:
        """The reverse of ``select_gathered``: ``rows`` [n, h] among those of ``size`` ranks,
        zeros elsewhere.
        """
        return rows if self.gathered is None else _spread(rows, self.gathered, size * self.padded)


def _spread(rows: Tensor, positions: Tensor, count: int) -> Tensor:
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, positions, rows)
