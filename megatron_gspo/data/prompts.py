"""Prompts from rows, and their order in training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_gspo.config import DataConfig
from megatron_gspo.config.data_checks import check_prompt_format
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompt_files import (
    Location,
    Paths,
    PromptError,
    Row,
    read_rows,
    split_notes,
)
from megatron_gspo.data.prompt_rows import (
    Message,
    Remarks,
    Tool,
    answer_of,
    field_of,
    mended,
    messages_of,
    tools_of,
)
from megatron_gspo.data.sample import Prompt, json_able
from megatron_gspo.errors import first_line

__all__ = [
    "PromptError",
    "PromptSet",
    "PromptSource",
    "Tokenizer",
    "build_prompts",
    "load_prompts",
]

Value = TypeVar("Value")
_SYSTEM_FIELDS = ("system_prompt", "system")
_UNREAD_FIELDS = ("images", "image", "videos", "video", "audios", "audio")


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Prompts with index 0 .. n-1."""

    prompts: Sequence[Prompt]
    dropped: int = 0
    """How many were longer than `max_prompt_length`."""

    notes: tuple[str, ...] = ()
    """Lines for the user about rows that are read otherwise than they may be meant."""


def load_prompts(
    paths: Paths, tokenizer: Tokenizer, data: DataConfig | None = None, *, split: str = "train"
) -> PromptSet:
    """Read and tokenise prompt files (`read_rows` has their kinds).

    data: format of the prompts; its `prompts`, `task` and verifier keys are not used. Raises
    ConfigError for an invalid format and PromptError for invalid rows.
    """
    data = data or DataConfig()
    check_prompt_format(data)
    rows = read_rows(paths, split=split)
    return build_prompts(
        rows, tokenizer, data, source=source_name(paths), notes=split_notes(paths, split=split)
    )


def source_name(paths: Paths) -> str:
    """Prompt files in a message: the path, or the first of several."""
    if isinstance(paths, (str, Path)):
        return str(paths)
    return str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def build_prompts(
    rows: Iterable[tuple[Location, Row]],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    source: str,
    notes: Iterable[str] = (),
) -> PromptSet:
    """All prompts of `iterate_prompts`; PromptError where none is left. notes: come before
    those about rows.
    """
    remarks = Remarks()
    read = list(iterate_prompts(rows, tokenizer, data, remarks))
    prompts = [prompt for prompt in read if prompt is not None]
    dropped = len(read) - len(prompts)
    check_any_left(len(prompts), dropped, source=source, limit=data.max_prompt_length)
    digests = np.array([token_digest(prompt) for prompt in prompts], dtype=np.int64)
    return PromptSet(
        prompts, dropped, (*notes, *remarks.lines(), *repetition_notes(digests, source))
    )


def iterate_prompts(
    rows: Iterable[tuple[Location, Row]], tokenizer: Tokenizer, data: DataConfig, remarks: Remarks
) -> Iterator[Prompt | None]:
    """Tokenise rows; None for a prompt that is dropped for its length. Every field besides prompt
    and answer goes to the prompt's metadata (as JSON values).

    `Prompt.index` counts the prompts that are kept. Raises PromptError naming the row for a missing
    key, a wrong type, an empty prompt, or one that is too long where overlong_prompts is "error".
    remarks: gets what is doubtful about a row that can be read.
    """
    reader = _RowReader(tokenizer, data, remarks)
    kept = 0
    limit = data.max_prompt_length
    for location, row in rows:
        try:
            prompt = reader.read(location, row, kept)
        except RecursionError as error:
            raise PromptError(f"{location}: is nested too deeply; write it flatter") from error
        if prompt.length > limit:
            if data.overlong_prompts == "error":
                raise PromptError(
                    f"{location}: prompt has {prompt.length} tokens but max_prompt_length is"
                    f" {limit}; raise it or set overlong_prompts to drop"
                )
            yield None
            continue
        yield prompt
        kept += 1


def check_any_left(kept: int, dropped: int, *, source: str, limit: int) -> None:
    """PromptError unless there is a prompt."""
    if not kept and dropped:
        raise PromptError(
            f"{source}: all {dropped} prompts are longer than max_prompt_length {limit}; raise it"
        )
    if not kept:
        raise PromptError(f"{source}: holds no prompts; give it at least one row")


def token_digest(prompt: Prompt) -> int:
    """64 bits of a hash of the prompt's tokens, as a signed number: equal for equal prompts."""
    digest = hashlib.blake2b(prompt.token_ids.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def repetition_notes(digests: np.ndarray, source: str) -> list[str]:
    """A line if prompts repeat others. digests: [n] int64, `token_digest` of each."""
    distinct = len(np.unique(digests))
    repeated = len(digests) - distinct
    if not repeated:
        return []
    return [
        f"{source}: {repeated:,} of {len(digests):,} prompts repeat another one ({distinct:,} are"
        " distinct); each copy is a prompt of its own"
    ]


class PromptSource:
    """Prompts in a deterministic order, addressed by a cursor: the number of prompts drawn or
    skipped so far.

    Epoch e covers cursors e * n .. e * n + n - 1. Its shuffled order depends on (seed, e) alone, so
    a resumed run needs only the cursor.
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
        """[n] int64: positions of the prompts in the order of that epoch."""
        return self._shuffled(len(self), epoch)

    def batch(self, cursor: int, size: int) -> tuple[ChosenPrompts, int]:
        """`size` different prompts from `cursor` on, and the cursor after them; a pure function.

        A batch does not span epochs: the same prompt twice would merge two groups into one. If
        fewer than `size` prompts are left, the rest of the epoch is skipped. Raises PromptError for
        size > n.
        """
        self._check(cursor, size)
        total = len(self)
        epoch, offset = divmod(cursor, total)
        if offset + size > total:
            epoch = epoch + 1
            offset = 0
        chosen = self.order(epoch)[offset : offset + size]
        return ChosenPrompts.by_index(self.prompts, chosen.tolist()), epoch * total + offset + size

    def _shuffled(self, length: int, *stream: int) -> np.ndarray:
        """[length] int64: positions in an order that depends on the seed and these numbers alone.

        Sorts raw generator output, the only stream that numpy guarantees not to change between
        versions.
        """
        if not self._shuffle:
            return np.arange(length)
        seed = np.random.SeedSequence([self._seed, *stream])
        return np.argsort(np.random.PCG64(seed).random_raw(length), kind="stable")

    def _check(self, cursor: int, size: int) -> None:
        if not 1 <= size <= len(self):
            raise PromptError(
                f"a batch needs {size} prompts and there are {len(self)}; lower rollout_batch_size"
                " or add prompts"
            )
        if cursor < 0:
            raise PromptError(f"cursor is {cursor}; it counts prompts from 0")


class _RowReader:
    """Makes prompts of rows in the format of a config, and remarks on what is doubtful about
    them.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataConfig, remarks: Remarks) -> None:
        self._tokenizer: Any = tokenizer  # some have no chat template, and no special tokens
        self._data = data
        self._remarks = remarks
        self._is_template_seen = False
        special = [
            token for token in getattr(tokenizer, "all_special_tokens", ()) if len(token) > 2
        ]
        self._special_token = re.compile("|".join(map(re.escape, special))) if special else None
        if data.chat_template:
            self._check_template()

    def read(self, location: Location, row: Row, index: int) -> Prompt:
        """The prompt of a row, of any length. Raises PromptError."""
        data = self._data
        row = self._mend(location, row)
        question = field_of(location, row, data.prompt_key, "prompt_key")
        if question is None or (isinstance(question, str) and not question.strip()):
            raise PromptError(f"{location}: key {data.prompt_key!r} is empty; remove the row")
        messages = messages_of(location, data.prompt_key, question)
        answer = None
        if messages is None:
            text = data.prompt_template.replace("{question}", question)
            messages = [{"role": "user", "content": text}]
            answered = False
            if data.chat_template:
                self._remark_special_token(location, question)
                text = self._apply_template(location, row, messages, continues=False)
        else:
            text, messages, answer, answered = self._text_of_messages(
                location, row, self._mend(location, messages)
            )
        if not answered and data.answer_key is not None:
            value = field_of(location, row, data.answer_key, "answer_key")
            answer = self._mend(location, answer_of(location, data.answer_key, value))
            if not answer:
                self._remark(
                    location,
                    f"key {data.answer_key!r} has no value; a verifier that needs it fails on it",
                )
        used = (data.prompt_key, data.answer_key)
        metadata = json_able({key: value for key, value in row.items() if key not in used})
        if not data.chat_template and row.get("tools"):
            self._remark(
                location, "the field tools is not in the prompt: only a chat template writes it"
            )
        self._remark_unread(location, row)
        ids = self._encode(location, text)
        if not ids:
            raise PromptError(f"{location}: key {data.prompt_key!r} is empty; remove the row")
        return Prompt(
            index,
            np.array(ids, dtype=np.int64),
            text,
            answer,
            metadata,
            messages=json_able(messages),
        )

    def _text_of_messages(
        self, location: Location, row: Row, messages: list[Message]
    ) -> tuple[str, list[Message], str | None, bool]:
        """(text of the prompt, messages in it, answer in the messages, whether the answer comes
        from there).
        """
        data = self._data
        key = data.prompt_key
        if not data.chat_template:
            raise PromptError(
                f"{location}: key {key!r} holds chat messages; set chat_template to true"
            )
        if data.prompt_template != "{question}":
            self._remark(location, "data.prompt_template is not applied to chat messages")
        answer = None
        continues = False
        last = messages[-1]
        if last["role"] == "assistant":
            action = data.last_assistant_message
            if action == "error":
                raise PromptError(
                    f"{location}: key {key!r} ends with a message of the assistant; set"
                    " data.last_assistant_message to drop, answer (it is the reference answer) or"
                    " continue (the response goes on from it)"
                )
            if action == "answer" and not isinstance(last["content"], str):
                raise PromptError(
                    f"{location}: the assistant's last message has no text to be the reference"
                    " answer"
                )
            answer = last["content"] if action == "answer" else None
            continues = action == "continue"
            if not continues:
                messages = messages[:-1]
        elif data.last_assistant_message == "answer":
            raise PromptError(
                f"{location}: key {key!r} ends with a message of role {last['role']!r}, and "
                "data.last_assistant_message is answer; remove the row, or set it to error"
            )
        if not messages or (messages[-1]["role"] == "assistant" and not continues):
            raise PromptError(
                f"{location}: key {key!r} has no message before the assistant's last; remove"
                " the row"
            )
        if not any(message["content"] for message in messages):
            raise PromptError(f"{location}: key {key!r} is empty; remove the row")
        for message in messages:
            if message["role"] != "assistant" and isinstance(message["content"], str):
                self._remark_special_token(location, message["content"])
        text = self._apply_template(location, row, messages, continues=continues)
        return text, messages, answer, data.last_assistant_message == "answer"

    def _apply_template(
        self, location: Location, row: Row, messages: list[Message], *, continues: bool
    ) -> str:
        messages = self._with_system_message(location, row, messages)
        arguments: dict[str, Any] = dict(self._data.chat_template_options)
        tools = self._mend(location, self._tools(location, row))
        if continues:
            arguments["continue_final_message"] = True
        generation = not continues
        text = self._render(location, messages, tools, generation, arguments)
        if tools and text == self._render(location, messages, [], generation, arguments):
            self._remark(
                location, "the chat template writes no tools; the field tools is not in the prompt"
            )
        if generation and not self._is_template_seen:
            self._is_template_seen = True
            self._check_generation_prompt(location, text, messages, tools, arguments)
        for message in messages:
            if message["role"] != "assistant" and not _is_written(message["content"], text):
                remark = (
                    "the chat template leaves out or changes the message of role"
                    f" {message['role']!r}"
                )
                self._remark(location, remark)
        return text

    def _check_generation_prompt(
        self,
        location: Location,
        text: str,
        messages: list[Message],
        tools: list[Tool],
        arguments: dict[str, Any],
    ) -> None:
        try:
            bare = self._render(location, messages, tools, False, arguments)
        except PromptError:  # a template that only prompts may write
            return
        if text == bare:
            remark = (
                "the chat template does not begin the assistant's turn (add_generation_prompt"
                " changes nothing)"
            )
            self._remark(location, f"{remark}; the prompt ends with {text[-20:]!r}")

    def _render(
        self,
        location: Location,
        messages: list[Message],
        tools: list[Tool],
        generation: bool,
        arguments: dict[str, Any],
    ) -> str:
        if tools:
            arguments = {"tools": tools, **arguments}
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **arguments
            )
        except Exception as error:  # a template may raise anything
            raise PromptError(
                f"{location}: the chat template refuses the messages ({first_line(error)}); correct"
                " the row"
            ) from error

    def _with_system_message(
        self, location: Location, row: Row, messages: list[Message]
    ) -> list[Message]:
        data = self._data
        system = data.system_prompt
        setting = "system_prompt"
        if data.system_prompt_key is not None:
            setting = "system_prompt_key"
            system = field_of(location, row, data.system_prompt_key, setting)
            if system is not None and not isinstance(system, str):
                raise PromptError(
                    f"{location}: key {data.system_prompt_key!r} is a {type(system).__name__}; it"
                    " must be text"
                )
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise PromptError(
                f"{location}: has a system message and {setting} is set; remove one of them"
            )
        return [{"role": "system", "content": system}, *messages]

    def _tools(self, location: Location, row: Row) -> list[Tool]:
        value = row.get("tools")
        if not value:
            return []
        tools = tools_of(value)
        if tools is None:
            self._remark(
                location, "the field tools is no list of tool definitions; it is not in the prompt"
            )
        return tools or []

    def _encode(self, location: Location, text: str) -> list[int]:
        """Token ids of a prompt. A chat template writes its own special tokens; otherwise the
        tokenizer adds its start token. Neither a second start token nor an end token that the text
        does not have stays."""
        tokenizer = self._tokenizer
        ids = list(tokenizer.encode(text, add_special_tokens=not self._data.chat_template))
        start = getattr(tokenizer, "bos_token", None)
        if start and ids[:2] == [tokenizer.bos_token_id] * 2 and not text.startswith(start + start):
            ids = ids[1:]
            self._remark(location, f"the tokenizer adds a second {start}, which is removed")
        end = getattr(tokenizer, "eos_token", None)
        if end and ids[-1:] == [tokenizer.eos_token_id] and not text.rstrip().endswith(end):
            ids = ids[:-1]
            self._remark(location, f"the tokenizer ends the prompt with {end}, which is removed")
        return ids

    def _check_template(self) -> None:
        """PromptError for a tokenizer without a chat template, or one that reads none of the
        options that are set.
        """
        template = getattr(self._tokenizer, "chat_template", "unknown")
        if not hasattr(self._tokenizer, "apply_chat_template") or template is None:
            raise PromptError(
                "the tokenizer has no chat template; set chat_template to false or use another"
                " tokenizer"
            )
        if template == "unknown":
            return
        source = (
            "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
        )
        for name in self._data.chat_template_options:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise PromptError(
                    f"data.chat_template_options.{name}: the tokenizer's chat template does not"
                    " read it; correct its name, or remove it"
                )

    def _mend(self, location: Location, value: Value) -> Value:
        whole = mended(value)
        if whole != value:
            self._remark(
                location, "has half of a surrogate pair, which no text has; U+FFFD takes its place"
            )
        return whole

    def _remark_special_token(self, location: Location, question: str) -> None:
        match = self._special_token.search(question) if self._special_token else None
        if match:
            remark = f"the question has the special token {match[0]!r}"
            self._remark(
                location, f"{remark}; if it is formatted already, set data.chat_template to false"
            )

    def _remark_unread(self, location: Location, row: Row) -> None:
        for name in _UNREAD_FIELDS:
            if row.get(name):
                self._remark(
                    location, f"the field {name} is not in the prompt: only text is trained"
                )
        data = self._data
        for name in _SYSTEM_FIELDS:
            if isinstance(row.get(name), str) and name not in (
                data.prompt_key,
                data.system_prompt_key,
            ):
                fix = f"data.system_prompt_key={name} takes it"
                self._remark(
                    location, f"the field {name} is not in the prompt; {fix} as the system message"
                )

    def _remark(self, location: Location, remark: str) -> None:
        self._remarks.add(remark, location)


def _is_written(content: object, text: str) -> bool:
    """Whether a message's content is in the text of a prompt, as it is or as in JSON; True for
    what is no text.
    """
    if not isinstance(content, str):
        return True
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
