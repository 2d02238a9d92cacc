"""Values of tokens as columns: the arrays of many samples, one sample after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

# Tokens whose temporaries stay in a core's cache; new memory for more costs as much as the work.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Columns:
    """Arrays over the tokens of n samples."""

    positions: np.ndarray
    """[n] int64, ascending, of the samples in their batch."""

    starts: np.ndarray
    """[n] int64, where the tokens of each begin in the arrays."""

    lengths: np.ndarray
    """[n] int64, how many each has."""

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The columns by name, [tokens, ...] each. A selection shares them with what it was selected
    from."""

    @classmethod
    def of(
        cls, positions: Sequence[int] | np.ndarray, lengths: np.ndarray, **arrays: np.ndarray
    ) -> Columns:
        """Arrays [sum of lengths, ...] of samples that follow each other in them."""
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls(
            np.asarray(positions, dtype=np.int64), np.cumsum(lengths) - lengths, lengths, arrays
        )

    def __len__(self) -> int:
        return len(self.positions)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        """[T, ...] the column: the values of all samples, end to end; a view where they are so in
        the array."""
        values = self.arrays[name]
        if self._is_contiguous:
            start = int(self.starts[0]) if len(self) else 0
            return values[start : start + self.num_tokens]
        return values[self._indices]

    @property
    def num_tokens(self) -> int:
        """T: tokens of all samples."""
        return int(self.lengths.sum())

    @cached_property
    def bounds(self) -> np.ndarray:
        """[n + 1] int64: where the values of each sample begin in a column, and T."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def first_tokens(self) -> dict[int, int]:
        """Where the values of each sample begin in a column, by its position in the batch."""
        return dict(zip(self.positions.tolist(), self.bounds.tolist(), strict=False))

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """[T] int64: which of the n samples each token is of, 0 .. n-1."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def _is_contiguous(self) -> bool:
        return bool((self.starts[1:] == self.starts[:-1] + self.lengths[:-1]).all())

    @cached_property
    def _indices(self) -> np.ndarray:
        """[T] of the samples' tokens in the arrays."""
        return ranges(self.starts, self.lengths)

    @cached_property
    def _slices(self) -> dict[int, slice]:
        """Where the tokens of each sample are in the arrays, by its position in the batch. Packing
        asks for many samples one by one, for which a search in an array would be slow."""
        ends = self.starts + self.lengths
        return {
            position: slice(start, end)
            for position, start, end in zip(
                self.positions.tolist(), self.starts.tolist(), ends.tolist(), strict=True
            )
        }

    def repeat(self, values: np.ndarray) -> np.ndarray:
        """[T] from a value [n] of each sample: it is that of each of its tokens."""
        return np.repeat(values, self.lengths)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[n] float64: the sum of each sample's values [T]."""
        return np.bincount(self.sample_ids, values, minlength=len(self))

    def of_sample(self, name: str, position: int) -> np.ndarray:
        """The values of the sample at a position of the batch, a view."""
        return self.arrays[name][self._slices[position]]

    def start_of(self, position: int) -> int:
        """Where the values of the sample at a position of the batch begin in the arrays."""
        return int(self._slices[position].start)

    def split(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Values [T, ...] as views by position in the batch."""
        parts = np.split(values, self.bounds[1:-1]) if len(self) else []
        return dict(zip(self.positions.tolist(), parts, strict=True))

    def with_column(self, name: str, values: np.ndarray) -> Columns:
        """The columns, and values [T, ...] as another or in place of the one of this name."""
        if len(values) != self.num_tokens:
            raise ValueError(
                f"column {name} has {len(values)} values; the samples have {self.num_tokens} tokens"
            )
        if len(self.starts) and (self.starts[0] or not self._is_contiguous):
            arrays = {other: self[other] for other in self.arrays if other != name}
            return Columns.of(self.positions, self.lengths, **arrays, **{name: values})
        return replace(self, arrays={**self.arrays, name: values})

    def only(self, *names: str) -> Columns:
        """The columns of these names, so that a column is added to a selection without a copy of
        all."""
        return replace(self, arrays={name: self.arrays[name] for name in names})

    def chosen(self, positions: Sequence[int] | np.ndarray) -> Columns:
        """The columns of the samples at these positions of the batch."""
        return self._rows(np.flatnonzero(np.isin(self.positions, positions)))

    def renumbered(self, positions: Sequence[int] | np.ndarray) -> Columns:
        """The columns of the samples at these positions of the batch, numbered by their place among
        them."""
        wanted = np.asarray(positions, dtype=np.int64)
        index = np.searchsorted(self.positions, wanted)
        index = np.minimum(index, max(len(self) - 1, 0))
        here = (
            self.positions[index] == wanted if len(self) else np.zeros(len(wanted), dtype=np.bool_)
        )
        return replace(self._rows(index[here]), positions=np.flatnonzero(here))

    def pieces(self) -> Iterator[Columns]:
        """These samples in groups of about `_PIECE` tokens, for work on all tokens; at least one,
        perhaps empty."""
        first = 0
        while True:
            limit = int(self.bounds[first]) + _PIECE
            fitting = int(np.searchsorted(self.bounds, limit, side="right")) - 1
            last = min(max(fitting, first + 1), len(self))
            yield self._rows(np.arange(first, last))
            first = last
            if first >= len(self):
                return

    def _rows(self, index: np.ndarray) -> Columns:
        return Columns(self.positions[index], self.starts[index], self.lengths[index], self.arrays)


def joined_columns(selections: Sequence[Columns], *names: str) -> Columns:
    """The columns of these names of some selections, one after the other; their samples are
    numbered anew."""
    lengths = np.concatenate([columns.lengths for columns in selections])
    arrays = {name: np.concatenate([columns[name] for columns in selections]) for name in names}
    return Columns.of(np.arange(len(lengths)), lengths, **arrays)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum of lengths] int64: start, start + 1, ... of each range, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
