"""From the fields of a row to messages, tool definitions, a reference answer, and text that can
be written.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from megatron_gspo.data.prompt_files import Location, PromptError, Row

Message = dict[str, Any]
Tool = dict[str, Any]

# Where data sets of the field have the question and the reference answer, for advice.
_QUESTIONS = (
    "prompt",
    "messages",
    "conversations",
    "question",
    "problem",
    "query",
    "instruction",
    "input",
    "text",
)
_ANSWERS = (
    "answer",
    "reward_model.ground_truth",
    "ground_truth",
    "solution",
    "label",
    "final_answer",
    "expected_answer",
    "reference_answer",
    "gold",
    "target",
    "extra_info.answer",
    "output",
    "response",
)
_GUESSES = {"prompt_key": _QUESTIONS, "answer_key": _ANSWERS}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # others have the same names


class Remarks:
    """What a user should know of rows that can be read: each remark with the number of rows and
    the first of them.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, Location] = {}

    def add(self, remark: str, location: Location) -> None:
        self._counts[remark] = self._counts.get(remark, 0) + 1
        self._first.setdefault(remark, location)

    def lines(self) -> tuple[str, ...]:
        """A line for each remark."""
        return tuple(
            f"{self._first[remark]}: {remark}"
            + (f" (and in {count - 1:,} other rows)" if count > 1 else "")
            for remark, count in self._counts.items()
        )


def field_of(location: Location, row: Row, key: str, setting: str) -> Any:
    """The value at a key, whose dots lead into fields.

    setting: the config key that names it, for PromptError.
    """
    try:
        return value_at(row, key)
    except KeyError:
        pass
    names = ", ".join(sorted(map(str, row))) or "nothing"
    guesses = [name for name in _GUESSES.get(setting, ()) if name != key and has_field(row, name)]
    guess = f", perhaps {guesses[0]}" if guesses else ""
    raise PromptError(
        f"{location}: key {key!r} is missing (found: {names}); set {setting} to the right"
        f" one{guess}"
    )


def has_field(row: Row, key: str) -> bool:
    """Whether a row has a value at the key; see `field_of`."""
    try:
        value_at(row, key)
    except KeyError:
        return False
    return True


def value_at(value: object, key: str) -> Any:
    """A key with dots is first a field of that name, then leads into a field: a mapping, a list by
    position, or JSON text of one. Raises KeyError."""
    if isinstance(value, str):
        value = _json_or_none(value)
    if isinstance(value, (list, tuple)):
        head, _, rest = key.partition(".")
        if not (head.isdecimal() and int(head) < len(value)):
            raise KeyError(key)
        return value_at(value[int(head)], rest) if rest else value[int(head)]
    if not isinstance(value, Mapping):
        raise KeyError(key)
    if key in value:
        return value[key]
    for position in range(len(key) - 1, 0, -1):
        if key[position] == "." and key[:position] in value:
            try:
                return value_at(value[key[:position]], key[position + 1 :])
            except KeyError:
                continue
    raise KeyError(key)


def messages_of(location: Location, key: str, value: object) -> list[Message] | None:
    """The chat messages in a field, each with `role` and `content`; None for a question that is
    text.

    They are a list of `role` and `content`, one such message, a list of ShareGPT's `from` and
    `value`, or JSON text of these. A content that is a list of parts becomes the text of its parts.
    Raises PromptError.
    """
    if isinstance(value, str):
        parsed = _json_or_none(value)
        messages = _as_messages(parsed)
        if messages is None:
            return None
    else:
        messages = _as_messages(value)
        if messages is None:
            raise PromptError(
                f"{location}: key {key!r} is a {type(value).__name__}; it must be text or a list of"
                " chat messages"
            )
    return [
        message | {"content": _content(location, number, message)}
        for number, message in enumerate(messages, start=1)
    ]


def _as_messages(value: object) -> list[Message] | None:
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, (list, tuple)) or not listed:
        return None
    messages = []
    for item in listed:
        if not isinstance(item, Mapping):
            return None
        if isinstance(item.get("from"), str) and "value" in item and "role" not in item:
            role = _SHAREGPT_ROLES.get(item["from"], item["from"])
            messages.append({"role": role, "content": item["value"]})
        elif isinstance(item.get("role"), str) and ("content" in item or item.get("tool_calls")):
            # Parquet and Arrow give each message the keys of all messages, with null where it has
            # none.
            present = {str(name): part for name, part in item.items() if part is not None}
            messages.append({"role": item["role"], "content": None} | _without_null(present))
        else:
            return None
    return messages


def _content(location: Location, number: int, message: Message) -> Any:
    """A message's content; a list of parts is the text of its parts, one after another."""
    content = message["content"]
    role = message["role"]
    where = f"{location}: message {number} (of role {role!r})"
    if isinstance(content, (list, tuple)):
        return "".join(_text_parts(where, content))
    if content is None and role != "assistant":
        raise PromptError(f"{where} has no content; give it text")
    if content is None or isinstance(content, str) or role == "tool":
        return content
    raise PromptError(f"{where} has a {type(content).__name__} as content; it must be text")


def _text_parts(where: str, parts: Iterable[object]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        text = None
        part_type = type(part).__name__
        if isinstance(part, Mapping):
            text = part.get("text")
            part_type = part.get("type") or "text"
        if part_type not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise PromptError(
                f"{where} has a part of type {part_type!r}; only text is trained, remove the part"
                " or the row"
            )
        yield text


def tools_of(value: object) -> list[Tool] | None:
    """Tool definitions: a list of mappings, or JSON text of it or of its items; None if the value
    is neither.

    Keys without a value are left out: Parquet and Arrow give each definition the keys of all.
    """
    parsed = _json_or_none(value) if isinstance(value, str) else value
    listed = [parsed] if isinstance(parsed, Mapping) else parsed
    if not isinstance(listed, (list, tuple)):
        return None
    tools = [_json_or_none(item) if isinstance(item, str) else item for item in listed]
    if not all(isinstance(tool, Mapping) for tool in tools):
        return None
    return [_without_null(tool) for tool in tools]


def answer_of(location: Location, key: str, value: Any) -> str | None:
    """A reference answer as text; None for a missing value (null, NaN, NaT, NA). Raises
    PromptError.
    """
    if isinstance(value, np.generic) or (
        getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    ):
        value = value.item()
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise PromptError(
                f"{location}: key {key!r} holds bytes that are no UTF-8 text; write text"
            ) from None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (float, Decimal)):
        number = Decimal(value)
        if number.is_nan():
            return None
        if number.is_infinite():
            raise PromptError(
                f"{location}: key {key!r} is {value}, no number; correct it, or write it as text"
            )
        if isinstance(value, Decimal) and abs(value.adjusted()) < 100:
            return format(value, "f")
        return str(value)
    if isinstance(value, int):
        return str(value)
    raise PromptError(
        f"{location}: key {key!r} is a {type(value).__name__}; it must be text or a number (other"
        " fields are metadata)"
    )


def mended(value: Any) -> Any:
    """JSON data in which each half of a surrogate pair, which no UTF-8 text can have, is U+FFFD;
    whole pairs are joined."""
    if isinstance(value, str):
        if is_text(value):
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {mended(key): mended(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(mended(item) for item in value)
    return [mended(item) for item in value] if isinstance(value, list) else value


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8: it has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_or_none(text: str) -> Any:
    """A mapping or list in JSON text; None if the text is something else."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_null(value: Any) -> Any:
    """Data without the keys of mappings that have no value."""
    if isinstance(value, Mapping):
        return {str(key): _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_without_null(item) for item in value]
    return value
