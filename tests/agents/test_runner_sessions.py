"""Runners with one client for all of their runs: the key of runners and `x-session-id` name a run.

Skipped where the clients of OpenAI and Anthropic are not installed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.rewards.scorer import FAILURE
from tests.agents.test_agent_host import request
from tests.agents.test_runners import Runners, runners
from tests.support.agent_endpoint import in_event_loop

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")


@asynccontextmanager
async def openai_client(served: Runners, **options: Any) -> AsyncIterator[Any]:
    address = await served.address()
    named = {"base_url": f"{address['url']}/v1", "api_key": address["key"], **options}
    async with openai.AsyncOpenAI(**named) as client:
        yield client


def session(task: dict[str, Any]) -> dict[str, str]:
    return {"x-session-id": task["session_id"]}


async def play(client: Any, task: dict[str, Any], reward: float, turns: int = 3) -> None:
    """A run, over OpenAI's client alone."""
    of_run = client.with_options(default_headers=session(task))
    messages: list[Any] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{task['prompt']}, turn {turn}"})
        reply = await of_run.chat.completions.create(model=task["model"], messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    await of_run.post("/reward", body={"reward": reward}, cast_to=object)
    await of_run.post("/end", cast_to=object)


@in_event_loop
async def test_one_client_plays_several_runs_at_the_same_time(tmp_path: Path) -> None:
    """The samples are those of runs that each have a client of their own."""
    requests = [request(index) for index in range(4)]
    async with runners(tmp_path) as served:
        samples = served.submit(*requests)
        async with openai_client(served) as client:
            tasks = [await served.claim() for _ in requests]
            await asyncio.gather(*(play(client, task, task["index"]) for task in tasks))
        shared = await samples
        samples = served.submit(*requests)
        for _ in requests:
            task = await served.claim()
            named = {"base_url": task["base_url"], "api_key": task["key"]}
            async with openai.AsyncOpenAI(**named) as client:
                await play(client, task, task["index"])
        alone = await samples
    assert [sample.reward for sample in shared] == [0.0, 1.0, 2.0, 3.0]
    assert [sample.metadata["agent"]["calls"] for sample in shared] == [3] * 4
    assert [s.tokens.tolist() for s in shared] == [s.tokens.tolist() for s in alone]
    assert [s.metadata["messages"] for s in shared] == [s.metadata["messages"] for s in alone]


@in_event_loop
async def test_anthropics_client_streams_in_a_session(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        samples = served.submit(request(0), request(1))
        address = await served.address()
        named = {"base_url": address["url"], "api_key": address["key"]}
        async with anthropic.AsyncAnthropic(**named) as client:
            for task in [await served.claim(), await served.claim()]:
                async with client.messages.stream(
                    model=task["model"],
                    max_tokens=32,
                    messages=[{"role": "user", "content": task["prompt"]}],
                    extra_headers=session(task),
                ) as stream:
                    assert (await stream.get_final_message()).stop_reason == "end_turn"
                await served.send(task, "reward", reward=task["index"])
                await served.send(task, "end")
        assert [sample.reward for sample in await samples] == [0.0, 1.0]


@in_event_loop
async def test_a_session_needs_the_key_of_runners(tmp_path: Path) -> None:
    """Nor is the key of a run that of a session, nor a number its name."""
    async with runners(tmp_path) as served:
        served.submit(request(0), request(1))
        first = await served.claim()
        waiting = served.opened[1]
        for key in (first["key"], "another"):
            async with openai_client(served, api_key=key, default_headers=session(first)) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.models.list()
                assert refused.value.code == "invalid_runner_key"
        for name in ("", "unknown", first["key"], str(waiting.number)):
            async with openai_client(served, default_headers={"x-session-id": name}) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.models.list()
                assert refused.value.code == "session_over"
        async with openai_client(served) as client:
            with pytest.raises(openai.BadRequestError, match="x-session-id is missing"):
                await client.models.list()
        assert first["session_id"] not in first["base_url"]


@in_event_loop
async def test_a_session_ends_with_its_run(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        samples = served.submit(request())
        task = await served.claim()
        async with openai_client(served) as client:
            await play(client, task, 0.5)
            with pytest.raises(openai.AuthenticationError) as refused:
                await play(client, task, 1.0)
            assert refused.value.code == "session_over"
        [sample] = await samples
        assert sample.reward == 0.5 and FAILURE not in sample.metadata


@in_event_loop
async def test_a_runner_that_falls_silent_loses_its_session(tmp_path: Path) -> None:
    """Its requests renew the lease while it talks; the next runner has another session."""
    async with runners(tmp_path, lease=1.0) as served:
        samples = served.submit(request())
        lost = await served.claim()
        await served.until_lost(lost)
        task = await served.claim()
        assert task["session_id"] != lost["session_id"]
        async with openai_client(served) as client:
            with pytest.raises(openai.AuthenticationError):
                await play(client, lost, 1.0)
            [run] = served.opened
            run._last_sign -= 1000.0
            await client.post("/renew", cast_to=object, options={"headers": session(task)})
            assert run.silence < 1000.0
            await play(client, task, 0.25)
        [sample] = await samples
        assert sample.reward == 0.25
        assert sample.metadata["agent"]["calls"] == 3
