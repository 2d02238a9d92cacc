"""What the dialects share: checked fields of requests, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gspo.agents.conversation import CallError, Tool, invalid_request

MODELS = ("policy", "policy-frozen")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Sampling is the run's: a reply of another distribution could not be trained on.
_IMPOSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


def model_of(body: Mapping[str, Any]) -> str:
    """The model of a request. Raises CallError 404 for one that is not served."""
    model = body.get("model", MODELS[0])
    if model not in MODELS:
        raise CallError(
            404,
            "model_not_found",
            f"model {str(model)[:80]!r} is not served; use 'policy', or 'policy-frozen' for calls"
            " that are not trained on",
        )
    return str(model)


def model_list() -> dict[str, Any]:
    """The models, with the fields of both APIs."""
    models = [
        {
            "id": name,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "megatron-gspo",
            "display_name": name,
        }
        for name in MODELS
    ]
    ends = {"first_id": MODELS[0], "last_id": MODELS[-1], "has_more": False}
    return {"object": "list", "data": models, **ends}


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, None or a list of text parts, joined with line
    breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_request(f"{where}: content is neither text nor a list of parts")
    return "\n".join(_part_text(item, where) for item in content)


def _part_text(item: Any, where: str) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        if item.get("type", "text") in _TEXT_PARTS and isinstance(item.get("text"), str):
            return item["text"]
        if item.get("type") == "refusal" and isinstance(item.get("refusal"), str):
            return item["refusal"]
        raise invalid_request(
            f"{where}: a part of type {str(item.get('type'))[:40]!r} is not supported; send text"
        )
    raise invalid_request(f"{where}: a part of the content is neither text nor an object")


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A field that is a list of objects; [] if it is absent."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid_request(f"{name} must be a list of objects")
    return value


def string(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """A field that must be a string; "" if it is absent."""
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid_request(f"{where}{name} must be a string")
    return value


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set: a positive number of tokens."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid_request(f"{name} must be a whole number above 0")
        return value
    return None


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field that is a string or a list of strings; empty ones are left out."""
    value = body.get(name)
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise invalid_request(f"{name} must be a string or a list of strings")
    return tuple(item for item in strings if item)


def tool(definition: Mapping[str, Any], schema: str) -> Tool:
    """A tool of a request. schema: the field with the JSON schema of its arguments."""
    name = string(definition, "name", "tools: ")
    if not name:
        raise invalid_request("tools: a function has no name")
    parameters = definition.get(schema) or {}
    if not isinstance(parameters, dict):
        raise invalid_request(f"tool {name!r}: {schema} must be an object")
    return Tool(name, string(definition, "description", f"tool {name!r}: "), parameters)


def imposed(body: Mapping[str, Any], others: Sequence[str] = ()) -> tuple[str, ...]:
    """Fields that are set and have no effect. others: besides those of sampling."""
    return tuple(name for name in (*_IMPOSED, *others) if body.get(name) is not None)


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()
