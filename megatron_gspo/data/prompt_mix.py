"""Prompts of several sources (`data.sources`), drawn in proportion to their weights."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import overload

import numpy as np

from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompts import PromptError, PromptSource
from megatron_gspo.data.sample import Prompt


class MixedPrompts(Sequence[Prompt]):
    """The prompts of all sources, one source after another. An access makes a new `Prompt` with its
    index among all of them and the name of its source.

    sources: prompts of each source, by its name. ends: [sources] int64, the index after the last
    prompt of each.
    """

    def __init__(self, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self.sources = dict(prompts)
        self.ends = np.cumsum([len(source) for source in prompts.values()])

    def source_numbers(self, indices: np.ndarray) -> np.ndarray:
        """[n] int64: positions in `sources` of those of the prompts with these indices [n]."""
        return np.searchsorted(self.ends, indices, side="right")

    def __len__(self) -> int:
        return int(self.ends[-1])

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> ChosenPrompts: ...
    def __getitem__(self, index: int | slice) -> Prompt | ChosenPrompts:
        if isinstance(index, slice):
            return ChosenPrompts.by_index(self, range(len(self))[index])
        index = range(len(self))[index]  # raises IndexError, and counts from the end
        number = int(self.source_numbers(np.array(index)))
        name, source = list(self.sources.items())[number]
        prompt = source[index - int(self.ends[number]) + len(source)]
        return replace(prompt, index=index, source=name)


def of_each_source(prompts: Sequence[Prompt], indices: np.ndarray) -> dict[str, np.ndarray]:
    """[n] bool by the name of a source: which of the prompts with these indices [n] are of it. All
    are of "" where the prompts have no sources.
    """
    if not isinstance(prompts, MixedPrompts):
        return {"": np.ones(len(indices), dtype=bool)}
    numbers = prompts.source_numbers(indices)
    return {name: numbers == number for number, name in enumerate(prompts.sources)}


class MixedPromptSource(PromptSource):
    """`PromptSource` of several sources.

    Draw k takes the next prompt of the source that is furthest behind its share, so that after any
    number of draws each source has its share of them within one or two draws. Each source is
    shuffled and passed through on its own. The source and the prompt of draw k depend on k, the
    weights and the seed alone, so that a resumed run needs only the cursor.
    """

    def __init__(
        self,
        prompts: MixedPrompts,
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """weights: of each source, > 0."""
        super().__init__(prompts, seed=seed, shuffle=shuffle)
        self._lengths = [len(source) for source in prompts.sources.values()]
        self._starts = (prompts.ends - self._lengths).tolist()
        given = [Fraction(str(weights[name])) for name in prompts.sources]
        self._shares = [weight / sum(given) for weight in given]

    def batch(self, cursor: int, size: int) -> tuple[ChosenPrompts, int]:
        """See `PromptSource.batch`. A draw of a prompt that the batch has already, which a source
        gives where its pass ends within the batch, is skipped.
        """
        self._check(cursor, size)
        counts = draws_before(cursor, self._shares)
        waiting = [
            (_due(count, share), number)
            for number, (count, share) in enumerate(zip(counts, self._shares, strict=True))
        ]
        heapq.heapify(waiting)
        orders: dict[tuple[int, int], np.ndarray] = {}
        chosen: dict[int, None] = {}
        while len(chosen) < size:
            _, number = waiting[0]
            epoch, offset = divmod(counts[number], self._lengths[number])
            if (number, epoch) not in orders:
                orders[number, epoch] = self._shuffled(self._lengths[number], epoch, number)
            chosen[self._starts[number] + int(orders[number, epoch][offset])] = None
            counts[number] += 1
            heapq.heapreplace(waiting, (_due(counts[number], self._shares[number]), number))
            cursor += 1
        return ChosenPrompts.by_index(self.prompts, chosen), cursor

    def check_sizes(self, size: int) -> None:
        """PromptError if a batch of this size needs more prompts of a source than it has."""
        assert isinstance(self.prompts, MixedPrompts)
        for name, length, share in zip(
            self.prompts.sources, self._lengths, self._shares, strict=True
        ):
            needed = round(size * share)
            if needed > length:
                raise PromptError(
                    f"data.sources: a batch has {needed} prompts of {name}, which has {length};"
                    " lower its weight or rollout.rollout_batch_size, or add prompts"
                )


def draws_before(cursor: int, shares: Sequence[Fraction]) -> list[int]:
    """How many of the first `cursor` draws each source has.

    shares: of the sources, with the sum 1. The draws are those of Sainte-Lague's method of
    allotting seats, which never takes a draw back when there are more.
    """
    counts = [int(cursor * share + Fraction(1, 2)) for share in shares]
    while (missing := cursor - sum(counts)) != 0:
        if missing > 0:
            _, number = min((_due(counts[i], share), i) for i, share in enumerate(shares))
            counts[number] += 1
        else:
            _, number = max(
                (_due(counts[i] - 1, share), i) for i, share in enumerate(shares) if counts[i]
            )
            counts[number] -= 1
    return counts


def _due(count: int, share: Fraction) -> Fraction:
    """When a source that was drawn from `count` times is drawn from again, in draws of all."""
    return (count + Fraction(1, 2)) / share
