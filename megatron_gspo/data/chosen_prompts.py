"""Prompts by reference: a process that needs none of a batch's prompts reads none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from megatron_gspo.data.sample import Prompt


@dataclass(frozen=True, slots=True)
class PromptRef:
    """A prompt with this index, at `position` of `source`."""

    index: int
    source: Sequence[Prompt]
    position: int


class ChosenPrompts(Sequence[Prompt]):
    """Some prompts, each read from its source at every access."""

    def __init__(self, refs: Iterable[PromptRef]) -> None:
        self.refs = list(refs)

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> ChosenPrompts:
        """References to all of the prompts."""
        if isinstance(prompts, cls):
            return prompts
        return cls(PromptRef(prompt.index, prompts, i) for i, prompt in enumerate(prompts))

    @classmethod
    def by_index(cls, prompts: Sequence[Prompt], indices: Iterable[int]) -> ChosenPrompts:
        """The prompts with these indices, of prompts 0 to n - 1."""
        return cls(PromptRef(index, prompts, index) for index in indices)

    @property
    def indices(self) -> list[int]:
        """`Prompt.index` of each; nothing is read."""
        return [ref.index for ref in self.refs]

    def __len__(self) -> int:
        return len(self.refs)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> ChosenPrompts: ...
    def __getitem__(self, index: int | slice) -> Prompt | ChosenPrompts:
        if isinstance(index, slice):
            return ChosenPrompts(self.refs[index])
        ref = self.refs[index]
        return ref.source[ref.position]
