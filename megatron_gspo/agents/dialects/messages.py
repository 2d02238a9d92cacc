"""Anthropic's messages: requests to a `Call`, a `Reply` to a body or to a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_gspo.agents.conversation import (
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

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "overloaded_error",
}
_THINKING = ("thinking", "redacted_thinking")
PING = fields.event({"type": "ping"}, "ping")


def parse_call(body: Mapping[str, Any]) -> Call:
    """Tools that run at Anthropic are left out.

    Raises CallError for a request that is not valid or asks for what is not supported.
    """
    model = fields.model_of(body)
    messages = []
    system = fields.text_of(body.get("system"), "system")
    if system:
        messages.append(Message("system", system))
    sent = fields.objects(body, "messages")
    if not sent:
        raise invalid_request("messages is empty")
    for message in sent:
        messages += _messages(message)
    definitions = fields.objects(body, "tools")
    client_tools = [tool for tool in definitions if tool.get("type") in (None, "custom")]
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, dict):
        raise invalid_request("tool_choice must be an object")
    remarks = [*fields.imposed(body)]
    if choice.get("type") not in (None, "none", "auto"):
        remarks.append("tool_choice")
    if len(client_tools) < len(definitions):
        remarks.append("tools of the provider")
    return Call(
        tuple(messages),
        tuple(fields.tool(tool, "input_schema") for tool in client_tools),
        model=model,
        max_tokens=fields.token_limit(body, "max_tokens"),
        stop=fields.stop_strings(body, "stop_sequences"),
        stream=bool(body.get("stream")),
        calls_tools=choice.get("type") != "none",
        remarks=tuple(remarks),
    )


def response_body(call: Call, reply: Reply) -> dict[str, Any]:
    """A `message` with blocks of thinking, text and tool use."""
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": _blocks(reply),
        "stop_reason": _reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": {"input_tokens": len(reply.prompt), "output_tokens": len(reply.tokens)},
    }


def events(call: Call, reply: Reply) -> Iterator[bytes]:
    """The reply as the events of a message."""
    for data in _events(call, reply):
        yield fields.event(data, data["type"])


def token_count(prompt_length: int) -> dict[str, int]:
    """The body of an answer to `count_tokens`."""
    return {"input_tokens": prompt_length}


def error_body(error: CallError) -> dict[str, Any]:
    """The body of an error's response."""
    name = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": name, "code": error.code, "message": str(error)}}


def error_event(error: CallError) -> bytes:
    """An error within a stream."""
    return fields.event(error_body(error), "error")


def _messages(message: Mapping[str, Any]) -> list[Message]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid_request(f"messages: role {str(role)[:40]!r} is not known")
    where = f"messages: {role}"
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise invalid_request(f"{where}: content is neither text nor a list of blocks")
    if role == "assistant":
        return [_assistant(blocks, where)]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    messages = [_tool_result(block) for block in results]
    if others or not results:
        messages.append(Message(_ROLES[role], fields.text_of(others, where)))
    return messages


def _tool_result(block: Mapping[str, Any]) -> Message:
    where = "messages: tool_result"
    text = fields.text_of(block.get("content"), where)
    return Message("tool", text, tool_call_id=fields.string(block, "tool_use_id", f"{where}: "))


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    thoughts = [block for block in blocks if block.get("type") in _THINKING]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    texts = [block for block in blocks if block.get("type") not in (*_THINKING, "tool_use")]
    calls = tuple(map(_tool_use, uses))
    reasoning = "\n".join(
        block["thinking"] for block in thoughts if isinstance(block.get("thinking"), str)
    )
    ids = [call.id for call in calls] + [block.get("signature") for block in thoughts]
    return Message(
        "assistant",
        fields.text_of(texts, where),
        reasoning or None,
        calls,
        reply_id=next(filter(None, map(reply_id_of, ids)), ""),
    )


def _tool_use(block: Mapping[str, Any]) -> ToolCall:
    where = "messages: tool_use: "
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid_request(f"{where}input must be an object")
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(fields.string(block, "id", where), fields.string(block, "name", where), text)


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        signature = f"sig_{reply.id}"
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append(
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": json.loads(call.arguments),
            }
        )
    return blocks


def _events(call: Call, reply: Reply) -> Iterator[dict[str, Any]]:
    body = response_body(call, reply)
    usage = body["usage"]
    begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**usage, "output_tokens": 0}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(body["content"]):
        empty, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The block without its content, and the deltas that fill it."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signature]
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _reason(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "max_tokens"
    if reply.message.tool_calls:
        return "tool_use"
    return "end_turn" if reply.stop_string is None else "stop_sequence"
