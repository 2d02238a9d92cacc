"""The text of a response: what verifiers and environments get, and what the files of samples
show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

# the names that Transformers gives to special tokens without a meaning for a reader
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that decodes responses."""

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]: ...


class ResponseDecoder:
    """Token ids of responses to their texts, the same for every engine.

    Tags such as <answer> and the marks of channels are special tokens of some tokenizers. They are
    a part of the response and stay, unless `keep_special_tokens` is False. The tokens that end a
    response are removed, and those that have a name (padding, begin, end, ...).
    """

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Collection[int], *, keep_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._named_ids = {getattr(tokenizer, f"{name}_token_id", None) for name in _NAMES}
        self._end_ids = {*end_ids, *self._named_ids}

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of one response."""
        return self.batch([ids])[0]

    def batch(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """The texts of responses."""
        shown = [self._shown(ids) for ids in responses]
        return self._tokenizer.batch_decode(
            shown, skip_special_tokens=not self._keep_special_tokens
        )

    def _shown(self, ids: Sequence[int]) -> list[int]:
        length = len(ids)
        while length and ids[length - 1] in self._end_ids:
            length -= 1
        shown = list(ids[:length])
        if self._named_ids.isdisjoint(shown):
            return shown
        return [token for token in shown if token not in self._named_ids]
