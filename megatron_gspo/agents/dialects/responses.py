"""OpenAI's responses: requests to a `Call`, a `Reply` to a body or to a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_gspo.agents.conversation import (
    CALL_ID_PREFIX,
    Call,
    CallError,
    Message,
    Reply,
    Role,
    ToolCall,
    invalid_request,
    reply_id_of,
)
from megatron_gspo.agents.dialects import fields
from megatron_gspo.agents.dialects.chat import PING, error_body

__all__ = ["PING", "error_body", "error_event", "events", "parse_call", "response_body"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def parse_call(body: Mapping[str, Any]) -> Call:
    """Tools that are not functions run at OpenAI; they are left out.

    Raises CallError for a request that is not valid or asks for what is not supported.
    """
    model = fields.model_of(body)
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else fields.objects(body, "input")
    )
    messages = _messages(items)
    instructions = fields.string(body, "instructions")
    if instructions:
        messages.insert(0, Message("system", instructions))
    previous = fields.string(body, "previous_response_id")
    if not messages and not previous:
        raise invalid_request("input is empty")
    definitions = fields.objects(body, "tools")
    functions = [tool for tool in definitions if tool.get("type") == "function"]
    choice = body.get("tool_choice")
    remarks = [*fields.imposed(body)]
    if choice not in (None, "none", "auto"):
        remarks.append("tool_choice")
    if len(functions) < len(definitions):
        remarks.append("tools of the provider")
    return Call(
        tuple(messages),
        tuple(fields.tool(function, "parameters") for function in functions),
        model=model,
        max_tokens=fields.token_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        calls_tools=choice != "none",
        previous_reply_id=reply_id_of(previous) or previous,
        remarks=tuple(remarks),
    )


def response_body(call: Call, reply: Reply) -> dict[str, Any]:
    """A `response` with items for reasoning, text and calls."""
    return _response(call, reply, _items(reply))


def events(call: Call, reply: Reply) -> Iterator[bytes]:
    """The reply as the events of a response, each with its number."""
    for number, (name, data) in enumerate(_events(call, reply)):
        yield fields.event({"type": name, "sequence_number": number, **data}, name)


def error_event(error: CallError) -> bytes:
    """An error within a stream."""
    return fields.event(
        {"type": "error", "code": error.code, "message": str(error), "param": None}, "error"
    )


def _events(call: Call, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(call, reply, [], finished=False)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(reply)):
        yield from _item_events(index, item)
    last = "response.completed" if reply.finish_reason == "stop" else "response.incomplete"
    yield last, {"response": response_body(call, reply)}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    position = {"output_index": index, "item_id": item["id"]}
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        begun["arguments"] = ""
    else:
        begun["content"] = []
    yield "response.output_item.added", {"output_index": index, "item": begun}
    if item["type"] == "function_call":
        delta = {**position, "delta": item["arguments"]}
        yield "response.function_call_arguments.delta", delta
        done = {**position, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        position["content_index"] = 0
        content = item["content"][0]
        text = content["text"]
        name = content["type"]  # output_text or reasoning_text
        more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        yield "response.content_part.added", {**position, "part": {**content, "text": ""}}
        yield f"response.{name}.delta", {**position, "delta": text, **more}
        yield f"response.{name}.done", {**position, "text": text, **more}
        yield "response.content_part.done", {**position, "part": content}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """Consecutive items of the assistant make one message: reasoning, then text, then calls."""
    messages: list[Message] = []
    for item in items:
        name = item.get("type", "message")
        if name == "function_call_output":
            output = fields.text_of(item.get("output"), "input: function_call_output")
            answered = fields.string(item, "call_id", "input: ")
            messages.append(Message("tool", output, tool_call_id=answered))
        elif name == "function_call":
            _add_tool_call(messages, item)
        elif name == "reasoning":
            messages.append(_reasoning(item))
        elif name == "message":
            _add_message(messages, item)
        else:
            raise invalid_request(f"input: an item of type {str(name)[:40]!r} is not supported")
    return messages


def _add_message(messages: list[Message], item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid_request(f"input: role {str(role)[:40]!r} is not known")
    text = fields.text_of(item.get("content"), f"input: {role}")
    reply_id = reply_id_of(item.get("id")) if role == "assistant" else ""
    last = messages[-1] if messages else None
    if (
        role == "assistant"
        and last is not None
        and last.role == "assistant"
        and not last.content
        and not last.tool_calls
        and _may_be_one(last.reply_id, reply_id)
    ):
        messages[-1] = replace(last, content=text, reply_id=reply_id or last.reply_id)
    else:
        messages.append(Message(_ROLES[role], text, reply_id=reply_id))


def _may_be_one(first: str, second: str) -> bool:
    """Whether items with these reply ids can be of one reply."""
    return not first or not second or first == second


def _add_tool_call(messages: list[Message], item: Mapping[str, Any]) -> None:
    """A client may put the output of each call behind it: the ids tell which calls are of the same
    reply."""
    where = "input: function_call: "
    call = ToolCall(
        fields.string(item, "call_id", where),
        fields.string(item, "name", where),
        fields.string(item, "arguments", where),
    )
    reply_id = reply_id_of(call.id)
    last = len(messages) - 1
    at = last
    while reply_id and at >= 0 and messages[at].role == "tool":
        at -= 1
    message = messages[at] if at >= 0 else None
    if (
        message is not None
        and message.role == "assistant"
        and _may_be_one(message.reply_id, reply_id)
        and (at == last or message.reply_id == reply_id)
    ):
        calls = (*message.tool_calls, call)
        messages[at] = replace(message, tool_calls=calls, reply_id=message.reply_id or reply_id)
    else:
        messages.append(Message("assistant", tool_calls=(call,), reply_id=reply_id))


def _reasoning(item: Mapping[str, Any]) -> Message:
    content = item.get("content")
    reply_id = reply_id_of(item.get("id"))
    if not content:  # dropped by the client
        return Message("assistant", reply_id=reply_id)
    if not isinstance(content, list):
        raise invalid_request("input: reasoning: content must be a list")
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    reasoning = "\n".join(text for text in texts if isinstance(text, str))
    return Message("assistant", reasoning=reasoning, reply_id=reply_id)


def _items(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    status = "completed" if reply.finish_reason == "stop" else "incomplete"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.id}",
                "summary": [],
                "content": [thought],
                "status": status,
            }
        )
    if message.content or not message.tool_calls:
        text = {
            "type": "output_text",
            "text": message.content,
            "annotations": [],
            "logprobs": [],
        }
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for call in message.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id.removeprefix(CALL_ID_PREFIX)}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _response(
    call: Call, reply: Reply, items: list[dict[str, Any]], *, finished: bool = True
) -> dict[str, Any]:
    is_cut = finished and reply.finish_reason == "length"
    final = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": call.model,
        "status": final if finished else "in_progress",
        "output": items,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto" if call.calls_tools else "none",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,
            }
            for tool in call.tools
        ],
        "usage": _usage(reply) if finished else None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": len(reply.prompt),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(reply.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(reply.prompt) + len(reply.tokens),
    }
