"""The text of a reply as reasoning, content and tool calls, for models without a renderer of
their own.

Reasoning stands between <think> and </think>, and a tool call between <tool_call> and </tool_call>
as JSON with `name` and `arguments` (Qwen 2.5 and 3, Hermes and others).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_THINK_BEGIN = "<think>"
_THINK_END = "</think>"
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", flags=re.DOTALL)


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in a reply. arguments: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """malformed: number of tool calls that can't be read; their text stays in `content`."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()
    malformed: int = 0


def parse_reply(text: str, *, reasoning_is_open: bool, calls_tools: bool) -> ParsedReply:
    """Parse a reply's text without its end token.

    reasoning_is_open: the prompt ends within the reasoning. calls_tools: False leaves calls in the
    content.
    """
    reasoning, content = _split_reasoning(text, reasoning_is_open)
    calls: list[ParsedCall] = []
    malformed = 0
    kept = []
    end = 0
    for block in _TOOL_CALL.finditer(content) if calls_tools else ():
        call = _parse_call(block[1]) if block[2] else None
        if call is None:
            malformed += 1
            continue
        calls.append(call)
        kept.append(content[end : block.start()])
        end = block.end()
    kept.append(content[end:])
    return ParsedReply("".join(kept).strip("\n"), reasoning, tuple(calls), malformed)


def _split_reasoning(text: str, is_open: bool) -> tuple[str | None, str]:
    before, end, after = text.partition(_THINK_END)
    begins = before.lstrip().startswith(_THINK_BEGIN)
    if not begins and not is_open:
        return None, text
    reasoning = before.lstrip().removeprefix(_THINK_BEGIN).strip("\n")
    return reasoning, after.lstrip("\n") if end else ""


def _parse_call(text: str) -> ParsedCall | None:
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return make_call(call["name"], call.get("arguments", {}))


def make_call(name: str, arguments: Any) -> ParsedCall | None:
    """A call of parsed arguments; None unless they are an object, or the JSON text of one, that
    can be written as UTF-8."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not name or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        (name + text).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return ParsedCall(name, text)
