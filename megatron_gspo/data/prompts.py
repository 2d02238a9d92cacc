"""Prompts from rows, and their order in training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_gspo.config import DataConfig
from megatron_gspo.config.data_checks import check_prompt_format
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompt_files import Location, PromptError, Row, read_rows
from megatron_gspo.data.sample import Prompt, json_able

__all__ = [
    "PromptError",
    "PromptSet",
    "PromptSource",
    "Tokenizer",
    "build_prompts",
    "load_prompts",
]


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Prompts with index 0 .. n-1. dropped: how many were longer than `max_prompt_length`."""

    prompts: Sequence[Prompt]
    dropped: int = 0


def load_prompts(
    path: str | Path, tokenizer: Tokenizer, data: DataConfig | None = None, *, split: str = "train"
) -> PromptSet:
    """Read and tokenise a prompt file (kinds: `read_rows`).

    data: format of the prompts; its `prompts`, `task` and verifier keys are not used. Raises ConfigError for an
    invalid format and PromptError for invalid rows.
    """
    data = data or DataConfig()
    check_prompt_format(data)
    return build_prompts(read_rows(path, split=split), tokenizer, data, source=str(path))


def build_prompts(
    rows: Iterable[tuple[Location, Row]], tokenizer: Tokenizer, data: DataConfig, *, source: str
) -> PromptSet:
    """All prompts of `iterate_prompts`; PromptError where none is left."""
    found = list(iterate_prompts(rows, tokenizer, data))
    prompts = [prompt for prompt in found if prompt is not None]
    dropped = len(found) - len(prompts)
    check_any_left(len(prompts), dropped, source=source, limit=data.max_prompt_length)
    return PromptSet(prompts, dropped)


def iterate_prompts(
    rows: Iterable[tuple[Location, Row]], tokenizer: Tokenizer, data: DataConfig
) -> Iterator[Prompt | None]:
    """Tokenise rows; None for a prompt that is dropped for its length. Every field besides prompt and answer goes to
    the prompt's metadata (as JSON values).

    `Prompt.index` counts the prompts that are kept. Raises PromptError naming the row for a missing key, a
    wrong type, an empty prompt, or one that is too long where overlong_prompts is "error".
    """
    kept, limit = 0, data.max_prompt_length
    for location, row in rows:
        text = _prompt_text(location, row, tokenizer, data)
        # a chat template writes its own special tokens
        ids = tokenizer.encode(text, add_special_tokens=not data.chat_template)
        if not ids:
            raise PromptError(f"{location}: key {data.prompt_key!r} is empty; remove the row")
        if len(ids) > limit:
            if data.overlong_prompts == "error":
                raise PromptError(
                    f"{location}: prompt has {len(ids)} tokens but max_prompt_length is {limit}; "
                    "raise it or set overlong_prompts to drop"
                )
            yield None
            continue
        used = (data.prompt_key, data.answer_key)
        metadata = json_able({key: value for key, value in row.items() if key not in used})
        answer = _answer(location, row, data.answer_key)
        yield Prompt(kept, np.array(ids, dtype=np.int64), text, answer, metadata)
        kept += 1


def check_any_left(kept: int, dropped: int, *, source: str, limit: int) -> None:
    """PromptError unless there is a prompt."""
    if not kept and dropped:
        raise PromptError(f"{source}: all {dropped} prompts are longer than max_prompt_length {limit}; raise it")
    if not kept:
        raise PromptError(f"{source}: holds no prompts; give it at least one row")


class PromptSource:
    """Prompts in a deterministic order, addressed by a cursor: the number of prompts drawn or skipped so far.

    Epoch e covers cursors e * n .. e * n + n - 1. Its shuffled order depends on (seed, e) alone, so a resumed run
    needs only the cursor.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True):
        if not prompts:
            raise PromptError("a prompt source needs at least one prompt")
        self.prompts = prompts
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        return len(self.prompts)

    def order(self, epoch: int) -> np.ndarray:
        """[n] int64: positions of the prompts in the order of that epoch.

        Sorts raw generator output, the only stream that numpy guarantees not to change between versions.
        """
        if not self._shuffle:
            return np.arange(len(self))
        raw = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self))
        return np.argsort(raw, kind="stable")

    def batch(self, cursor: int, size: int) -> tuple[ChosenPrompts, int]:
        """`size` different prompts from `cursor` on, and the cursor after them; a pure function.

        A batch does not span epochs: the same prompt twice would merge two groups into one. If fewer than `size`
        prompts are left, the rest of the epoch is skipped. Raises PromptError for size > n.
        """
        total = len(self)
        if not 1 <= size <= total:
            raise PromptError(
                f"a batch needs {size} prompts and there are {total}; lower rollout_batch_size or add prompts"
            )
        if cursor < 0:
            raise PromptError(f"cursor is {cursor}; it counts prompts from 0")
        epoch, offset = divmod(cursor, total)
        if offset + size > total:
            epoch, offset = epoch + 1, 0
        chosen = self.order(epoch)[offset : offset + size]
        return ChosenPrompts.by_index(self.prompts, chosen.tolist()), epoch * total + offset + size


def _field(location: Location, row: Row, key: str, setting: str) -> Any:
    if key not in row:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        raise PromptError(f"{location}: key {key!r} is missing (found: {found}); set {setting} to the right one")
    return row[key]


def _prompt_text(location: Location, row: Row, tokenizer: Tokenizer, data: DataConfig) -> str:
    key = data.prompt_key
    question = _field(location, row, key, "prompt_key")
    if isinstance(question, str):
        if not question.strip():
            raise PromptError(f"{location}: key {key!r} is empty; remove the row")
        question = data.prompt_template.replace("{question}", question)
        if not data.chat_template:
            return question
        question = [{"role": "user", "content": question}]
    elif not _is_chat(question):
        kind = type(question).__name__
        raise PromptError(f"{location}: key {key!r} is a {kind}; it must be text or a list of chat messages")
    elif not data.chat_template:
        raise PromptError(f"{location}: key {key!r} holds chat messages; set chat_template to true")
    messages = list(question)
    if data.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise PromptError(f"{location}: has a system message and system_prompt is set; remove one of them")
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return _apply_chat_template(location, tokenizer, messages)


def _apply_chat_template(location: Location, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if (
        not hasattr(tokenizer, "apply_chat_template")
        or getattr(tokenizer, "chat_template", "unknown") is None
    ):
        raise PromptError(
            "the tokenizer has no chat template; set chat_template to false or use another tokenizer"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        reason = str(error).split("\n")[0]
        raise PromptError(
            f"{location}: the chat template refuses the messages ({reason}); correct the row"
        ) from error


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _answer(location: Location, row: Row, key: str | None) -> str | None:
    if key is None:
        return None
    value = _field(location, row, key, "answer_key")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value) if isinstance(value, bool) else str(value)
    kind = type(value).__name__
    raise PromptError(
        f"{location}: key {key!r} is a {kind}; it must be text or a number (other fields are metadata)"
    )
