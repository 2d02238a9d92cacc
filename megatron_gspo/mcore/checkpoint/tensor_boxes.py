"""Boxes: rectangular regions of a tensor, by which distributed checkpoints address what they
store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """``sizes`` elements from ``offsets`` on in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, by: Sequence[int]) -> Box:
        """This region relative to an origin that lies ``by`` further back."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def within(self, other: Box) -> Box | None:
        """The region that both share, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends, other._ends)
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    @property
    def _ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a row-major tensor as boxes, in order; each is
    contiguous in the tensor.

    At most ``2 * len(shape) - 1``: the rest of a first row, whole rows, the beginning of a last
    row.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(
        shape, first - 1, start - (first - 1) * row, row if start < first * row else 0
    )
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))
