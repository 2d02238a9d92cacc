"""What keeps the prefix: ten forms in which a policy writes a reply, which no client sends back as
it was written, and three messages that may follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_gspo.agents.conversation import Message, ToolCall
from megatron_gspo.agents.dialects.chat import parse_call
from megatron_gspo.agents.rendering import Rendering
from tests.agents.test_rendering import (
    FORMS,
    WITHOUT_CALL,
    package_rendering,
    reply_of,
    template_rendering,
)
from tests.support.agent_endpoint import BASH, in_event_loop, serving

QUESTION = {"role": "user", "content": "list"}
WITH_CALL = [name for name in FORMS if name not in WITHOUT_CALL]
# The forms that each kind of message follows.
NEXT = {
    "tool result": WITH_CALL,
    "tool result, reasoning left out": WITH_CALL,
    "user message": list(FORMS),
}


def follow(kind: str, sent: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client sends behind the question: the reply that it got, and what is new."""
    reply = dict(sent)
    if kind == "tool result, reasoning left out":
        reply.pop("reasoning_content", None)
    if kind == "user message":
        return [reply, {"role": "user", "content": "go on"}]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in sent["tool_calls"]
    ]
    return [reply, *results]


async def breaks(make: Callable[..., Rendering], thinking: str, kind: str) -> dict[str, str]:
    """By form: why a second call began another row, for the forms where it did."""
    causes = {}
    for name in NEXT[kind]:
        form = reply_of(FORMS[name])[:-1].tolist()
        async with serving(
            lambda prompt, seed, form=form: form, rendering=make(thinking=thinking)
        ) as served:
            sent = await served.message([QUESTION], tools=[BASH])
            await served.message([QUESTION, *follow(kind, sent)], tools=[BASH])
            if len(served.rows) > 1:
                [cause] = [key for key in served.run.tree.counts if key.startswith("breaks/")]
                causes[name] = cause.removeprefix("breaks/")
            served.check_rows()
    return causes


@pytest.mark.parametrize("kind", ["tool result", "tool result, reasoning left out"])
@pytest.mark.parametrize("thinking", ["template", "keep"])
@pytest.mark.parametrize("make", [template_rendering, package_rendering])
@in_event_loop
async def test_a_tool_result_keeps_the_tokens_of_every_form(
    make: Callable[..., Rendering], thinking: str, kind: str
) -> None:
    assert await breaks(make, thinking, kind) == {}


@pytest.mark.parametrize(
    "make, kept",
    [
        (template_rendering, ["no thinking", "other token split"]),
        # It appends to no reply here; that one is the same when it is rendered again.
        (package_rendering, ["no thinking"]),
    ],
)
@in_event_loop
async def test_a_user_message_keeps_those_of_replies_without_reasoning(
    make: Callable[..., Rendering], kept: list[str]
) -> None:
    expected = {name: "thinking" for name in FORMS if name not in kept}
    assert await breaks(make, "template", "user message") == expected


@pytest.mark.parametrize("make", [template_rendering, package_rendering])
@in_event_loop
async def test_a_user_message_keeps_those_of_every_form_where_reasoning_stays(
    make: Callable[..., Rendering],
) -> None:
    assert await breaks(make, "keep", "user message") == {}


@pytest.mark.parametrize(
    "kind, kept",
    [
        ("tool result", 3),
        ("tool result, reasoning left out", 1),
        ("user message", 1),
    ],
)
def test_rendered_again_few_forms_are_the_same_tokens(kind: str, kept: int) -> None:
    """What a server without the stored tokens would do with the same messages."""
    rendering = template_rendering()
    num_kept = 0
    for name in NEXT[kind]:
        [question] = parse_call({"model": "policy", "messages": [QUESTION]}).messages
        tools = parse_call({"model": "policy", "messages": [QUESTION], "tools": [BASH]}).tools
        prompt = rendering.render([question], tools)
        reply = reply_of(FORMS[name])
        parsed = rendering.parse(prompt, reply, tools, calls_tools=True)
        calls = [
            ToolCall(f"call_{i}", c.name, c.arguments) for i, c in enumerate(parsed.tool_calls)
        ]
        reasoning = None if kind.endswith("left out") else parsed.reasoning
        message = Message("assistant", parsed.content, reasoning, tuple(calls))
        if kind == "user message":
            new = [Message("user", "go on")]
        else:
            new = [Message("tool", "a", tool_call_id=call.id) for call in calls]
        again = rendering.render([question, message, *new], tools)
        stored = np.concatenate([prompt, reply])
        num_kept += np.array_equal(again[: len(stored)], stored)
    assert num_kept == kept
