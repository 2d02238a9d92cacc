"""Messages, calls and replies of agents in one form, whatever API an agent speaks.

`dialects` translates the requests of the APIs into a `Call` and a `Reply` back into their bodies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]

CALL_ID_PREFIX = "call_"
_OVER_LIMIT = "context_length_exceeded"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model.

    id: `call_<reply id>_<position>` if this endpoint issued it. arguments: JSON text.
    """

    id: str
    name: str
    arguments: str

    @cached_property
    def canonical(self) -> tuple[str, str]:
        """Name and arguments without the freedom of JSON: equal for equal calls."""
        return self.name, canonical_json(self.arguments)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    content: text; parts are joined with line breaks. reasoning: None where the client did not send
    it. tool_call_id: the call that a message of role "tool" answers. reply_id: of the reply that
    the client repeats, as far as one of the ids in the message tells; "" otherwise.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reply_id: str = ""

    def record(self) -> dict[str, Any]:
        """JSON-able, without empty fields: for verifiers and the `samples/` folder of a run."""
        fields = asdict(self)
        del fields["reply_id"]
        return {name: value for name, value in fields.items() if value}

    def repeats(self, known: Message, stop: Sequence[str] = ()) -> bool:
        """Whether a client that knows `known` and sends this message means the same.

        Ids do not count, arguments are compared as JSON, and reasoning only where it is sent. A
        reply may have lost the white space at its ends, and may have got back the string of `stop`
        that ended it.
        """
        if self.role != known.role:
            return False
        if self.role != "assistant":
            return self.content == known.content
        if [call.canonical for call in self.tool_calls] != [
            call.canonical for call in known.tool_calls
        ]:
            return False
        if self.reasoning is not None and self.reasoning.strip() != (known.reasoning or "").strip():
            return False
        sent = self.content.strip()
        text = known.content.strip()
        return sent == text or any(sent == (known.content + end).strip() for end in stop)


@dataclass(frozen=True)
class Tool:
    """A tool that the agent offers. parameters: JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A request for one reply.

    model: "policy" or "policy-frozen". max_tokens: None where the client sets no limit. stop:
    strings that end the reply. calls_tools: False if the client forbids tool calls; what looks like
    one then stays text. previous_reply_id: the messages continue this reply of the endpoint.
    remarks: names of fields that are ignored or imposed, for one warning each.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    model: str = "policy"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    calls_tools: bool = True
    log_probs: bool = False
    token_ids: bool = False
    previous_reply_id: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The answer to a `Call`.

    id: 24 hexadecimal digits; all ids in the bodies of responses contain it. finish_reason: "stop"
    or "length". stop_string: the string of `Call.stop` that ended it, or None. prompt, tokens: [P],
    [r] token ids. log_probs: [r], or None where the engine has none. token_texts: [r], only if the
    call asks for log-probs.
    malformed_calls: what looks like a tool call and can't be read; it stays in the text.
    """

    id: str
    message: Message
    finish_reason: str
    stop_string: str | None
    prompt: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    created: int
    token_texts: tuple[str, ...] = ()
    malformed_calls: int = 0


class CallError(Exception):
    """A request that gets an error as its answer; the message is one line for the agent's author.

    status: of HTTP. code: as OpenAI names the error.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def is_limit(self) -> bool:
        """Whether a limit of the run is reached; see `over_limit`."""
        return self.code == _OVER_LIMIT


def invalid_request(message: str) -> CallError:
    """400: the request is not valid, or asks for what is not supported."""
    return CallError(400, "invalid_request_error", message)


def over_limit(message: str) -> CallError:
    """400: a limit of the run is reached. Clients take it for the end of the model's context,
    which they do not try again; LiteLLM knows it by the beginning of OpenAI's message."""
    message = f"This model's maximum context length is reached: {message}"
    return CallError(400, _OVER_LIMIT, message)


def canonical_json(text: str) -> str:
    """Equal for JSON texts of equal values; other text as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def call_id(reply_id: str, position: int) -> str:
    """The id of a tool call."""
    return f"{CALL_ID_PREFIX}{reply_id}_{position}"


def reply_id_of(issued: Any) -> str:
    """The reply id in an id that the endpoint issued, `<prefix>_<reply id>[_<position>]`; "" for
    another one."""
    if not isinstance(issued, str):
        return ""
    pieces = issued.replace("-", "_").split("_")
    if len(pieces) < 2 or len(pieces[1]) != 24:
        return ""
    return pieces[1] if set(pieces[1]) <= set("0123456789abcdef") else ""
