"""The clients of OpenAI and Anthropic as judges: bodies, streams, errors and repetitions.

Skipped where the packages are not installed.
"""

import asyncio
import json
import logging
from contextlib import asynccontextmanager

import pytest

from megatron_gspo.agents import endpoint as endpoint_module
from megatron_gspo.errors import EngineError
from tests.support.agent_endpoint import BASH, TOKENIZER, call_text, in_event_loop, serving

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

QUESTION = {"role": "user", "content": "list"}
FLAT_BASH = {"type": "function", **BASH["function"]}
ANTHROPIC_BASH = {"name": "bash", "input_schema": BASH["function"]["parameters"]}


def thinks_and_calls(prompt: str, seed: int) -> str:
    """Two turns with two calls each, then an answer, always with reasoning."""
    turn = prompt.count("<tool_response>") // 2
    calls = call_text(command="echo hé") + "\n" + call_text(command=f"ls {turn}")
    return "<think>\nwhy\n</think>\n\n" + (f"I will.\n{calls}" if turn < 2 else "done")


@asynccontextmanager
async def clients(script, **limits):
    """(served, OpenAI's client, Anthropic's client) of one run."""
    async with serving(script, **limits) as served:
        url = served.endpoint.base_url(served.run)
        async with (
            openai.AsyncOpenAI(base_url=url, api_key=served.run.key) as for_openai,
            anthropic.AsyncAnthropic(
                base_url=served.endpoint.anthropic_url(served.run), api_key=served.run.key
            ) as for_anthropic,
        ):
            yield served, for_openai, for_anthropic


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streams(request, monkeypatch) -> bool:
    """Whether replies are streamed; a stream that waits has pings."""
    monkeypatch.setattr(endpoint_module, "PING_SECONDS", 0.01)
    return request.param


async def after_a_while(served) -> None:
    """Let calls wait for some pings."""
    served.generator.gate.clear()
    asyncio.get_running_loop().call_later(0.05, served.generator.gate.set)


def check_one_row(served, turns: int = 3) -> None:
    assert [len(texts) for texts in served.trained_texts()] == [turns]
    served.check_rows()


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@in_event_loop
async def test_chat_completions(streams: bool, keeps_reasoning: bool) -> None:
    async with clients(thinks_and_calls) as (served, client, _):
        messages = [{"role": "system", "content": "be brief"}, QUESTION]
        for turn in range(3):
            await after_a_while(served)
            fields = {"model": "policy", "messages": messages, "tools": [BASH]}
            if streams:
                options = {"include_usage": True}
                async with client.chat.completions.stream(
                    **fields, stream_options=options
                ) as stream:
                    completion = await stream.get_final_completion()
            else:
                completion = await client.chat.completions.create(**fields)
            choice = completion.choices[0]
            assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
            assert choice.message.reasoning_content == "why"
            call = served.generator.calls[-1]
            assert completion.usage.prompt_tokens == len(call.prompt)
            assert completion.usage.completion_tokens == len(call.tokens)
            message = {"role": "assistant", "content": choice.message.content}
            if keeps_reasoning:
                message["reasoning_content"] = choice.message.reasoning_content
            tool_calls = choice.message.tool_calls or []
            if tool_calls:
                message["tool_calls"] = [
                    {
                        "id": tool_call.id,
                        "type": "function",
                        "function": {
                            "name": tool_call.function.name,
                            "arguments": tool_call.function.arguments,
                        },
                    }
                    for tool_call in tool_calls
                ]
                assert json.loads(tool_calls[0].function.arguments) == {"command": "echo hé"}
                assert json.loads(tool_calls[1].function.arguments) == {"command": f"ls {turn}"}
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": tool_call.id, "content": "a"}
                for tool_call in tool_calls
            ]
        assert choice.message.content == "done"
        check_one_row(served)


async def respond(client, streams: bool, **fields):
    """A response, and the names of its events."""
    if not streams:
        return await client.responses.create(model="policy", tools=[FLAT_BASH], **fields)
    async with client.responses.stream(model="policy", tools=[FLAT_BASH], **fields) as stream:
        numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(len(numbers)))
        return await stream.get_final_response()


@pytest.mark.parametrize("history", ["items", "without reasoning", "outputs between", "by id"])
@in_event_loop
async def test_responses(streams: bool, history: str) -> None:
    async with clients(thinks_and_calls) as (served, client, _):
        items = [QUESTION]
        previous = {}
        for turn in range(3):
            await after_a_while(served)
            response = await respond(
                client, streams, input=items, instructions="be brief", **previous
            )
            assert response.status == "completed"
            output = [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in output if item["type"] == "function_call"]
            assert [item["type"] for item in output] == (
                ["reasoning", "message"] + ["function_call"] * len(calls)
            )
            assert len(calls) == (2 if turn < 2 else 0)
            results = [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "a"}
                for call in calls
            ]
            if history == "by id":
                previous = {"previous_response_id": response.id}
                items = results
            elif history == "outputs between":
                items += output[:2]
                for call, result in zip(calls, results, strict=True):
                    items += [call, result]
            elif history == "without reasoning":
                items += output[1:] + results
            else:
                items += output + results
        assert response.output_text == "done"
        assert response.usage.output_tokens == len(served.generator.calls[-1].tokens)
        check_one_row(served)


@pytest.mark.parametrize("keeps_thinking", [True, False])
@in_event_loop
async def test_messages(streams: bool, keeps_thinking: bool) -> None:
    async with clients(thinks_and_calls) as (served, _, client):
        messages = [QUESTION]
        for turn in range(3):
            await after_a_while(served)
            fields = {
                "model": "policy",
                "max_tokens": 1000,
                "system": [{"type": "text", "text": "be brief"}],
                "messages": messages,
                "tools": [ANTHROPIC_BASH],
            }
            counted = await client.messages.count_tokens(
                **{name: value for name, value in fields.items() if name != "max_tokens"}
            )
            if streams:
                async with client.messages.stream(**fields) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**fields)
            assert counted.input_tokens == message.usage.input_tokens
            assert message.usage.output_tokens == len(served.generator.calls[-1].tokens)
            assert message.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            blocks = [block.model_dump(exclude_none=True) for block in message.content]
            names = ["thinking", "text", "tool_use", "tool_use"][: 4 if turn < 2 else 2]
            assert [block["type"] for block in blocks] == names
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "a"}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            kept = blocks if keeps_thinking else blocks[1:]
            if results:
                results[-1]["cache_control"] = {"type": "ephemeral"}
            messages += [
                {"role": "assistant", "content": kept},
                {"role": "user", "content": results},
            ]
            for message_before in messages[:-1]:
                for block in message_before["content"]:
                    if isinstance(block, dict):
                        block.pop("cache_control", None)
        assert message.content[-1].text == "done"
        check_one_row(served)


@in_event_loop
async def test_stop_sequences_and_cut_replies() -> None:
    async with clients(lambda prompt, seed: "is the list") as (_, for_openai, for_anthropic):
        fields = {"model": "policy", "messages": [QUESTION]}
        stopped = await for_anthropic.messages.create(
            **fields, max_tokens=99, stop_sequences=["the"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "the")
        assert stopped.content[0].text == "is "
        cut = await for_anthropic.messages.create(**fields, max_tokens=1)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
        response = await for_openai.responses.create(
            model="policy", input="list", max_output_tokens=1
        )
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@in_event_loop
async def test_timeout_same_body_again(api: str) -> None:
    """The clients repeat a call by themselves: one draw, and one row."""
    async with clients(lambda prompt, seed: "done") as (served, for_openai, for_anthropic):
        served.generator.gate.clear()
        asyncio.get_running_loop().call_later(1.5, served.generator.gate.set)
        if api == "chat":
            await for_openai.with_options(timeout=0.5, max_retries=9).chat.completions.create(
                model="policy", messages=[QUESTION]
            )
        elif api == "responses":
            await for_openai.with_options(timeout=0.5, max_retries=9).responses.create(
                model="policy", input="list"
            )
        else:
            await for_anthropic.with_options(timeout=0.5, max_retries=9).messages.create(
                model="policy", max_tokens=99, messages=[QUESTION]
            )
        assert len(served.generator.calls) == 1
        assert served.run.tree.counts["adopted"] == 1
        check_one_row(served, turns=1)


@in_event_loop
async def test_errors_are_final(caplog) -> None:
    """The clients do not send a request again."""
    caplog.set_level(logging.INFO)
    async with clients(lambda prompt, seed: "done", max_context=40) as served_and_clients:
        served, for_openai, for_anthropic = served_and_clients
        long = [{"role": "user", "content": "long " * 100}]
        for_openai = for_openai.with_options(max_retries=9)
        for_anthropic = for_anthropic.with_options(max_retries=9)

        async def failures(model="policy", messages=(QUESTION,)) -> list[Exception]:
            fields = {"model": model, "messages": list(messages)}
            calls = (
                for_openai.chat.completions.create(**fields),
                for_openai.responses.create(model=model, input=list(messages)),
                for_anthropic.messages.create(**fields, max_tokens=9),
            )
            return [await failure_of(call) for call in calls]

        for error, package in zip(
            await failures(messages=long), (openai, openai, anthropic), strict=True
        ):
            assert isinstance(error, package.BadRequestError)
            assert "This model's maximum context length is " in str(error)
            assert error.response.json()["error"]["code"] == "context_length_exceeded"
        for error, package in zip(
            await failures(model="gpt"), (openai, openai, anthropic), strict=True
        ):
            assert isinstance(error, package.NotFoundError)
        served.endpoint.end_run(served.run)
        for error, package in zip(await failures(), (openai, openai, anthropic), strict=True):
            assert isinstance(error, package.AuthenticationError)
        assert served.rows == []
        assert "HTTP Request" in caplog.text and "Retrying" not in caplog.text


@pytest.mark.parametrize("api", ["chat", "messages"])
@in_event_loop
async def test_no_engine_is_tried_again(api: str, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with clients(lambda prompt, seed: "done") as (served, for_openai, for_anthropic):
        served.generator.failures = [EngineError("no server has answered for 60 s")]
        if api == "chat":
            await for_openai.with_options(max_retries=9).chat.completions.create(
                model="policy", messages=[QUESTION]
            )
        else:
            await for_anthropic.with_options(max_retries=9).messages.create(
                model="policy", max_tokens=9, messages=[QUESTION]
            )
        assert "Retrying" in caplog.text
        check_one_row(served, turns=1)


async def failure_of(call) -> Exception:
    try:
        await call
    except Exception as error:
        return error
    raise AssertionError("the call has not failed")


@in_event_loop
async def test_an_error_within_a_stream() -> None:
    """A run that ends while a stream waits ends the stream."""
    async with clients(lambda prompt, seed: "done") as (served, for_openai, for_anthropic):
        served.generator.gate.clear()
        stream = await for_openai.chat.completions.create(
            model="policy", messages=[QUESTION], stream=True
        )
        events = await for_anthropic.messages.create(
            model="policy", max_tokens=9, messages=[QUESTION], stream=True
        )
        served.endpoint.end_run(served.run)
        for package, answer in ((openai, stream), (anthropic, events)):
            with pytest.raises(package.APIError, match="its run may have ended"):
                async for _ in answer:
                    pass


@in_event_loop
async def test_models_are_listed() -> None:
    async with clients(lambda prompt, seed: "done") as (_, for_openai, for_anthropic):
        for client in (for_openai, for_anthropic):
            assert [model.id async for model in client.models.list()] == ["policy", "policy-frozen"]


@in_event_loop
async def test_token_ids_and_log_probs() -> None:
    async with clients(lambda prompt, seed: "done") as (served, client, _):
        completion = await client.chat.completions.create(
            model="policy",
            messages=[QUESTION],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        choice = completion.choices[0]
        tokens = served.generator.calls[0].tokens.tolist()
        assert choice.token_ids == tokens
        assert [entry.token for entry in choice.logprobs.content] == [
            TOKENIZER.decode([token]) for token in tokens
        ]
