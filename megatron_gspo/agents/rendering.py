"""Messages to token ids, and the tokens of a reply back to a message.

A prompt that continues an earlier call is its tokens and a suffix: the new messages and the
beginning of the next reply. What the policy has drawn is so never tokenised again. `renderers`,
an optional package, knows the formats of many model families; `TemplateRendering` serves the others
by the tokenizer's chat template.

Role and end tokens within messages are encoded as text: no message can end its own turn.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import TypeAdapter

from megatron_gspo.agents.conversation import (
    CallError,
    Message,
    Tool,
    ToolCall,
    invalid_request,
)
from megatron_gspo.agents.reply_parsing import ParsedCall, ParsedReply, make_call, parse_reply
from megatron_gspo.agents.session_tree import BreakCause
from megatron_gspo.errors import InputError, first_line

Thinking = Literal["template", "keep"]
"""Whether reasoning leaves the prompt where the chat template drops it, or never."""

# Marks begin and end with characters to which Unicode gives no meaning.
_MARK = "\ue000"
_MARK_END = "\ue001"
# In place of a reply and its reasoning, to find what the chat template writes around them.
_REPLY = f"{_MARK}reply{_MARK_END}"
_REASONING = f"{_MARK}reasoning{_MARK_END}"
# In place of a special token in a message, by the token's number.
_GUARD = re.compile(f"{_MARK}([0-9]+){_MARK_END}")
_TAIL = 16  # tokens at the end of a prompt that show whether reasoning is open


class Rendering(Protocol):
    """How the messages of a model family are written and read."""

    end_ids: tuple[int, ...]
    """Tokens that end a reply."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """[P] int64: the prompt for the next reply. Raises CallError 400 for messages that the
        model's format does not have."""
        ...

    def extend(
        self,
        prompt: np.ndarray,
        reply: np.ndarray,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> np.ndarray | BreakCause:
        """The prompt that begins with `prompt` and `reply` and adds `new`, or why there is none.

        known: the messages that prompt and reply are of.
        """
        ...

    def parse(
        self, prompt: np.ndarray, reply: np.ndarray, tools: Sequence[Tool], *, calls_tools: bool
    ) -> ParsedReply:
        """The reply as the client gets it."""
        ...

    def text(self, tokens: np.ndarray) -> str:
        """The text of token ids, special tokens included."""
        ...


class RenderingError(InputError):
    """A tokenizer whose chat template can't be used for agents; one line with the fix."""


class TemplateRendering:
    """`Rendering` by the tokenizer's chat template.

    The suffix of a continued prompt is what the template writes behind the end token of a marked
    reply. The constructor tests this on short conversations, and whether a tool call that the
    template writes can be read; if not, requests with tools are refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int],
        *,
        thinking: Thinking = "template",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """tokenizer: of Transformers, with a chat template; it is copied, because encoding sets
        its state. end_ids: tokens that end a reply; the first one closes a reply that was cut off.
        options: arguments of the template.

        Raises RenderingError for a template that does not end replies with one of `end_ids` or
        does not begin the next one.
        """
        self.end_ids = tuple(end_ids)
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thinking = thinking
        self._options = dict(options or {})
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        self._special = sorted(special | set(self._tokenizer.all_special_tokens), key=len)[::-1]
        # (?!) never matches.
        alternatives = "|".join(map(re.escape, self._special)) or "(?!)"
        self._special_pattern = re.compile(f"({alternatives})")
        self._ends = [self._tokenizer.decode([token]) for token in self.end_ids]
        self._check_suffix()
        self._reads_calls = self._check_calls()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """See `Rendering.render`."""
        if tools and not self._reads_calls:
            raise invalid_request(
                "the model's tool calls can't be read without a renderer: pip install"
                " 'megatron-gspo[agents]', or write the tools into the messages"
            )
        return self._encode(self._template(messages, tools))

    def extend(
        self,
        prompt: np.ndarray,
        reply: np.ndarray,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> np.ndarray | BreakCause:
        """See `Rendering.extend`."""
        # The template writes a conversation that has the last reply alone, with a mark in its place.
        reply_mark = Message("assistant", _REPLY, _REASONING, known[-1].tool_calls)
        turn = [Message("user", "-"), reply_mark]
        text = self._template([*turn, *new], tools)
        suffix = self._after_reply(text)
        if suffix is None:
            return "rendering"
        if (
            self._thinking == "template"
            and _REASONING not in text
            and any(message.reasoning for message in known)
            and _REASONING in self._template(turn, tools, generate=False)
        ):
            return "thinking"
        is_closed = len(reply) > 0 and int(reply[-1]) in self.end_ids
        closing = [] if is_closed else [self.end_ids[0]]
        return np.concatenate([prompt, reply, np.array(closing, np.int64), self._encode(suffix)])

    def parse(
        self, prompt: np.ndarray, reply: np.ndarray, tools: Sequence[Tool], *, calls_tools: bool
    ) -> ParsedReply:
        """See `Rendering.parse`. Without tools a call stays text."""
        ids = reply.tolist()
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        tail = self._tokenizer.decode(prompt[-_TAIL:].tolist())
        return parse_reply(
            self._tokenizer.decode(ids),
            reasoning_is_open=tail.rstrip().endswith("<think>"),
            calls_tools=calls_tools and bool(tools),
        )

    def text(self, tokens: np.ndarray) -> str:
        """See `Rendering.text`."""
        return self._tokenizer.decode(tokens.tolist())

    def _template(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True
    ) -> str:
        arguments = dict(self._options)
        if tools:
            arguments["tools"] = [self._guarded(_tool_body(tool)) for tool in tools]
        try:
            return self._tokenizer.apply_chat_template(
                [self._guarded(_message_body(message)) for message in messages],
                tokenize=False,
                add_generation_prompt=generate,
                **arguments,
            )
        except Exception as error:  # a template may raise anything
            raise invalid_request(
                f"the chat template refuses the messages ({first_line(error)})"
            ) from error

    def _after_reply(self, text: str) -> str | None:
        """What the template writes behind the end token of the marked reply."""
        _, mark, behind_mark = text.partition(_REPLY)
        positions = [(behind_mark.find(end), end) for end in self._ends if end in behind_mark]
        if not mark or not positions:
            return None
        position, end = min(positions)
        return behind_mark[position + len(end) :]

    def _encode(self, text: str) -> np.ndarray:
        """The token ids of what the template has written. What stood in messages is encoded as
        text, also where it looks like a special token."""
        if _MARK not in text:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self._special:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                plain = self._restored(piece)
                ids += self._tokenizer.encode(
                    plain, add_special_tokens=False, split_special_tokens=True
                )
        return np.array(ids, dtype=np.int64)

    def _guarded(self, value: Any) -> Any:
        """A value of messages with a mark in place of each special token in its texts."""
        if isinstance(value, str):
            return self._special_pattern.sub(
                lambda match: f"{_MARK}{self._special.index(match[0])}{_MARK_END}", value
            )
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        return value

    def _restored(self, text: str) -> str:
        """A text with the special tokens that `_guarded` has taken out."""

        def token_of(mark: re.Match[str]) -> str:
            number = int(mark[1])
            return self._special[number] if number < len(self._special) else mark[0]

        return _GUARD.sub(token_of, text)

    def _check_suffix(self) -> None:
        """Raise RenderingError if the suffix depends on what stands before the last turn."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise RenderingError(
                "the tokenizer has no chat template, which agents need; add chat_template.jinja to"
                " the model's folder"
            )
        earlier = [Message("user", "one"), Message("assistant", "two")]
        for turn, new, tools in _probes():
            try:
                suffix = self._after_reply(self._template([*turn, *new], tools))
                later_suffix = self._after_reply(self._template([*earlier, *turn, *new], tools))
            except CallError:
                if tools:  # a template without tools
                    continue
                raise RenderingError(
                    "the chat template refuses a conversation of two turns"
                ) from None
            if suffix is None:
                raise RenderingError(
                    f"the chat template does not end a reply with {' or '.join(self._ends)};"
                    " correct the template or the end tokens"
                )
            if suffix != later_suffix:
                raise RenderingError(
                    "what the chat template writes behind a reply depends on earlier turns, so"
                    " that agents can't append to it; pip install 'megatron-gspo[agents]' has"
                    " renderers for many models"
                )

    def _check_calls(self) -> bool:
        """Whether a call that the template writes is read as the same call."""
        call = ToolCall("call_1", "look", '{"at": "it"}')
        turn = [Message("user", "one"), Message("assistant", _REPLY, tool_calls=(call,))]
        try:
            text = self._template(turn, [Tool("look", "Look.")], generate=False)
        except CallError:
            return False
        written = text.partition(_REPLY)[2]
        end = min(written.index(end) for end in self._ends if end in written)
        parsed = parse_reply(written[:end], reasoning_is_open=False, calls_tools=True)
        return parsed.tool_calls == (ParsedCall(call.name, call.arguments),)


def _probes() -> list[tuple[list[Message], list[Message], list[Tool]]]:
    """(a turn with a marked reply, what follows, tools): conversations that agents have."""
    question = Message("user", "three")
    call = ToolCall("call_1", "look", "{}")
    answer = Message("assistant", _REPLY)
    calling = Message("assistant", _REPLY, tool_calls=(call,))
    result = Message("tool", "four", tool_call_id=call.id)
    return [
        ([question, answer], [Message("user", "four")], []),
        ([question, calling], [result], [Tool("look", "Look.")]),
    ]


class PackageRendering:
    """`Rendering` by the package `renderers`.

    Its renderers write the roles' tokens by their ids and everything else through the tokenizer,
    which here encodes special tokens as text. The constructor compares with the tokenizer as it is.
    """

    def __init__(self, tokenizer: Any, name: str, *, thinking: Thinking = "template") -> None:
        """tokenizer: of Transformers; it is copied. name: of a renderer, such as "qwen3".

        Raises RenderingError if there is no such renderer, or it does not fit the tokenizer.
        """
        plain = copy.deepcopy(tokenizer)
        self._tokenizer = _TextTokenizer(plain)
        self._renderer = _make_renderer(self._tokenizer, name, thinking)
        self.end_ids = tuple(self._renderer.get_stop_token_ids())
        probe = [
            Message("system", "one"),
            Message("user", "two"),
            Message("assistant", "three", "four"),
        ]
        bodies = [_message_body(message) for message in probe]
        reference = _make_renderer(plain, name, thinking)
        if self._renderer.render_ids(bodies) != reference.render_ids(bodies):
            raise RenderingError(
                f"renderer {name!r} writes role tokens as text, so that messages could end their"
                " turn; use the chat template"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """See `Rendering.render`."""
        try:
            ids = self._renderer.render_ids(
                [_message_body(message) for message in messages],
                tools=[_tool_body(tool) for tool in tools] or None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a renderer may raise anything
            reason = first_line(error)
            raise invalid_request(f"the model's format refuses the messages ({reason})") from error
        return np.array(ids, dtype=np.int64)

    def extend(
        self,
        prompt: np.ndarray,
        reply: np.ndarray,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> np.ndarray | BreakCause:
        """See `Rendering.extend`."""
        names = {call.id: call.name for message in known for call in message.tool_calls}
        bodies = [_message_body(message) for message in new]
        for body in bodies:
            if body["role"] == "tool" and body.get("tool_call_id") in names:
                body["name"] = names[body["tool_call_id"]]
        try:
            rendered = self._renderer.bridge_to_next_turn(
                prompt.tolist(),
                reply.tolist(),
                bodies,
                tools=[_tool_body(tool) for tool in tools] or None,
            )
        except Exception:  # a full rendering shows whether the messages are at fault
            return "rendering"
        if rendered is None:
            has_question = any(message.role == "user" for message in new)
            return "thinking" if has_question else "rendering"
        extended = np.array(rendered.token_ids, dtype=np.int64)
        stored = np.concatenate([prompt, reply])
        if not np.array_equal(extended[: len(stored)], stored):
            return "rendering"
        return extended

    def parse(
        self, prompt: np.ndarray, reply: np.ndarray, tools: Sequence[Tool], *, calls_tools: bool
    ) -> ParsedReply:
        """See `Rendering.parse`. Without tools a call stays text."""
        parsed = self._renderer.parse_response(
            reply.tolist(),
            tools=[_tool_body(tool) for tool in tools] or None,
            prompt_ids=prompt.tolist(),
        )
        calls = []
        texts = [parsed.content]
        has_tools = calls_tools and bool(tools)
        malformed = 0
        for attempt in parsed.tool_calls:
            call = None
            if has_tools and attempt.status == "ok":
                call = make_call(attempt.name or "", attempt.arguments)
            if call is not None:
                calls.append(call)
                continue
            texts.append(self._text_of(attempt, reply))
            if has_tools:
                malformed += 1
        content = "\n".join(filter(None, texts))
        return ParsedReply(content, parsed.reasoning_content or None, tuple(calls), malformed)

    def _text_of(self, attempt: Any, reply: np.ndarray) -> str:
        """What the policy has written for a call, with its marks where their place is known."""
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        return self._tokenizer.decode(reply[start:end].tolist())

    def text(self, tokens: np.ndarray) -> str:
        """See `Rendering.text`."""
        return self._tokenizer.decode(tokens.tolist())


class _TextTokenizer:
    """A tokenizer that encodes special tokens as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        return self._tokenizer(text, **{**options, "split_special_tokens": True})

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, **{**options, "split_special_tokens": True})


def _make_renderer(tokenizer: Any, name: str, thinking: Thinking) -> Any:
    try:
        from renderers import create_renderer
        from renderers.configs import RendererConfig
    except ImportError as error:
        raise RenderingError(
            "the package renderers is not installed: pip install 'megatron-gspo[agents]'"
        ) from error
    if name in ("auto", "default"):  # a guess by the folder's name; the chat template
        raise RenderingError(f"renderer {name!r} can't extend a prompt; name the model family's")
    options: dict[str, Any] = {"name": name}
    if thinking == "keep":
        options["thinking_retention"] = "all"
    try:
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(options))
    except Exception as error:  # of pydantic, of the package, of its files
        raise RenderingError(f"no renderer {name!r} for this model: {first_line(error)}") from error


def _message_body(message: Message) -> dict[str, Any]:
    """A message as chat templates and renderers take it."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _arguments(text: str) -> Any:
    """Some templates take arguments as an object alone."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tool_body(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}
