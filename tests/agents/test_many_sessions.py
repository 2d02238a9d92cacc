"""Many agents at the same time: no call is lost, and none gets the reply of another."""

import asyncio
import gc
import sys
import weakref

import numpy as np

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.generation import CallLimits, Generation
from tests.support.agent_endpoint import TOKENIZER, Serving, in_event_loop, serving
from tests.support.scripted_generator import ScriptedGenerator

SESSIONS = 200
TURNS = 4


def echo(prompt: str, seed: int) -> str:
    """The last message of the prompt."""
    return "heard " + prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]


class SlowGenerator(ScriptedGenerator):
    """Replies after other times than it is asked in."""

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        await asyncio.sleep(seed % 97 / 1000)
        return await super().generate(prompt, limits, seed=seed, routes_start=routes_start)


async def talk(served: Serving, number: int, run: AgentRun) -> list[str]:
    """A conversation, and the replies that are expected in it."""
    messages = []
    expected = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"session {number} turn {turn}"})
        message = await served.message(messages, run=run)
        expected.append(f"heard session {number} turn {turn}")
        assert message["content"] == expected[-1]
        messages.append(message)
    status, _ = await served.post("reward", {"reward": number}, run=run)
    assert status == 200
    return expected


@in_event_loop
async def test_200_sessions() -> None:
    async with serving(echo) as served:
        served.generator = SlowGenerator(TOKENIZER, echo)
        runs = [served.open_run(seed=number) for number in range(SESSIONS)]
        talks = [talk(served, number, run) for number, run in enumerate(runs)]
        conversations = await asyncio.gather(*talks)
        assert len(served.generator.calls) == SESSIONS * TURNS
        for number, (run, expected) in enumerate(zip(runs, conversations, strict=True)):
            [row] = run.tree.rows()
            response = row.tokens[row.prompt_length :].tolist()
            replies = [TOKENIZER.decode(response[turn.start : turn.end]) for turn in row.turns]
            assert replies == [f"{text}<|im_end|>" for text in expected]
            assert (run.tree.num_calls, run.tree.undelivered, run.reward) == (TURNS, 0, number)


@in_event_loop
async def test_runs_that_are_over_leave_nothing_behind() -> None:
    """A path of its own for each run fills the caches of URLs, which hold 128, and no more."""
    async with serving(echo) as served:

        async def blocks_after(seeds: range) -> int:
            """Python's blocks of memory when runs with these seeds are over."""
            for seed in seeds:
                run = served.open_run(seed=seed)
                text = f"session {seed}"
                await served.message([{"role": "user", "content": text}], run=run)
                served.endpoint.end_run(run)
            served.generator.calls.clear()
            gc.collect()
            return sys.getallocatedblocks()

        before = await blocks_after(range(150))
        grown = await blocks_after(range(150, 300)) - before
        assert grown < 3 * 150, "a run that is kept has a hundred blocks"


@in_event_loop
async def test_a_run_that_is_over_is_no_cycle() -> None:
    """Python looks for old cycles after thousands of runs alone."""
    async with serving(echo) as served:

        async def play() -> weakref.ref[AgentRun]:
            run = served.endpoint.open_run(served.generator, served.limits, seed=1)
            await served.message([{"role": "user", "content": "hello"}], run=run)
            served.endpoint.end_run(run)
            return weakref.ref(run)

        gc.disable()
        try:
            known = await play()
            async with asyncio.timeout(60.0):
                while known() is not None:  # until the connection has answered
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
