"""OpenAI's chat completions: requests to a `Call`, a `Reply` to a body or to a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_gspo.agents.conversation import (
    Call,
    CallError,
    Message,
    Reply,
    Role,
    Tool,
    ToolCall,
    invalid_request,
    reply_id_of,
)
from megatron_gspo.agents.dialects import fields

PING = b": waiting\n\n"
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def parse_call(body: Mapping[str, Any]) -> Call:
    """Raises CallError for a request that is not valid or asks for what is not supported."""
    model = fields.model_of(body)
    if body.get("n") not in (None, 1):
        raise invalid_request("n must be 1: ask again for another reply")
    messages = parse_messages(fields.objects(body, "messages"))
    if not messages:
        raise invalid_request("messages is empty")
    choice = body.get("tool_choice")
    options = body.get("stream_options") or {}
    remarks = fields.imposed(body, ["response_format"])
    return Call(
        messages,
        tuple(map(_tool, fields.objects(body, "tools"))),
        model=model,
        max_tokens=fields.token_limit(body, "max_completion_tokens", "max_tokens"),
        stop=fields.stop_strings(body, "stop"),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        calls_tools=choice != "none",
        log_probs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        remarks=remarks if choice in (None, "none", "auto") else (*remarks, "tool_choice"),
    )


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Raises CallError for a message that is not valid."""
    return tuple(map(_message, messages))


def response_body(call: Call, reply: Reply) -> dict[str, Any]:
    """A `chat.completion`. With `return_token_ids` it has the ids of prompt and reply."""
    choice = {"index": 0, "message": _reply_message(reply), "finish_reason": _reason(reply)}
    choice["logprobs"] = _log_probs(reply) if call.log_probs else None
    body = {**_head(call, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
    if call.token_ids:
        choice["token_ids"] = reply.tokens.tolist()
        body["prompt_token_ids"] = reply.prompt.tolist()
    return body


def events(call: Call, reply: Reply) -> Iterator[bytes]:
    """The reply as `chat.completion.chunk`s, and the mark of the end."""
    head = _head(call, reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
        return fields.event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if reply.message.reasoning:
        yield chunk({"reasoning_content": reply.message.reasoning})
    if reply.message.content:
        yield chunk({"content": reply.message.content})
    for index, tool_call in enumerate(reply.message.tool_calls):
        begun = {"id": tool_call.id, "type": "function"}
        function = {"name": tool_call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, **begun, "function": function}]})
        arguments = {"arguments": tool_call.arguments}
        yield chunk({"tool_calls": [{"index": index, "function": arguments}]})
    extra: dict[str, Any] = {"logprobs": _log_probs(reply)} if call.log_probs else {}
    if call.token_ids:
        extra["token_ids"] = reply.tokens.tolist()
    yield chunk({}, _reason(reply), **extra)
    if call.stream_usage:
        yield fields.event({**head, "choices": [], "usage": _usage(reply)})
    yield fields.event("[DONE]")


def error_body(error: CallError) -> dict[str, Any]:
    """The body of an error's response; also that of the responses API."""
    failure = {
        "message": str(error),
        "type": "server_error" if error.status >= 500 else "invalid_request_error",
        "param": None,
        "code": error.code,
    }
    return {"error": failure}


def error_event(error: CallError) -> bytes:
    """An error within a stream."""
    return fields.event(error_body(error))


def _message(message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid_request(f"messages: role {str(role)[:40]!r} is not known")
    where = f"messages: {role}"
    content = fields.text_of(message.get("content"), where)
    if role != "assistant":
        call_id = fields.string(message, "tool_call_id", f"{where}: ")
        return Message(_ROLES[role], content, tool_call_id=call_id)
    calls = tuple(map(_tool_call, fields.objects(message, "tool_calls")))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    return Message(
        "assistant",
        content,
        reasoning if isinstance(reasoning, str) else None,
        calls,
        reply_id=reply_id_of(calls[0].id) if calls else "",
    )


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid_request("messages: a tool call has no function")
    where = "messages: tool call: "
    return ToolCall(
        fields.string(call, "id", where),
        fields.string(function, "name", where),
        fields.string(function, "arguments", where),
    )


def _tool(definition: Mapping[str, Any]) -> Tool:
    function = definition.get("function")
    if definition.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid_request("tools: only functions are supported")
    return fields.tool(function, "parameters")


def _head(call: Call, reply: Reply, name: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": name,
        "created": reply.created,
        "model": call.model,
    }


def _reply_message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if not message.tool_calls:
        body["content"] = message.content
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": tool_call.id,
                "type": "function",
                "function": {"name": tool_call.name, "arguments": tool_call.arguments},
            }
            for tool_call in message.tool_calls
        ]
    return body


def _reason(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": len(reply.tokens),
        "total_tokens": len(reply.prompt) + len(reply.tokens),
    }


def _log_probs(reply: Reply) -> dict[str, Any] | None:
    if reply.log_probs is None:
        return None
    return {
        "content": [
            {"token": text, "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for text, log_prob in zip(reply.token_texts, reply.log_probs.tolist(), strict=True)
        ]
    }
