"""What 200 agents at the same time cost: the latency that the endpoint adds to a call, its CPU time,
and how much slower a training step in the same process becomes.

The engine is a fake that replies after a fixed time with 64 tokens. Agents live in another process.
Each waits most of the time, as for its tools: it makes a call every 10 s, so that 200 make 20 a
second. A call adds a tool's result of about 60 tokens to a history of up to 16 turns. The step is a
forward and backward pass of a tiny model in the main thread, with one thread of torch.

    OMP_NUM_THREADS=1 python benchmarks/agent_sessions.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import numpy as np

from benchmarks.common import by_turns, hardware, say

TURNS = 16
REPLY_TOKENS = 64
REPLY_SECONDS = 0.05
RESULT = "the command has printed this line and nothing else"


class FakeEngine:
    """A `Generator` that takes `REPLY_SECONDS`. seconds: that each call has taken."""

    paused_seconds = 0.0

    def __init__(self, end_token: int) -> None:
        self.seconds: list[float] = []
        self._tokens = np.array([*range(65, 65 + REPLY_TOKENS - 1), end_token], dtype=np.int64)

    async def generate(self, prompt: Any, limits: Any, *, seed: int, routes_start: int) -> Any:
        """See `Generator.generate`."""
        from megatron_gspo.agents.generation import Generation

        start = time.perf_counter()
        await asyncio.sleep(REPLY_SECONDS)
        count = len(self._tokens)
        reply = Generation(
            self._tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop"
        )
        self.seconds.append(time.perf_counter() - start)
        return reply


def play_agents(control: Connection, runs: Sequence[tuple[str, str]], period: float) -> None:
    """Agents, in a process of their own. control: True lets them work, False makes them wait and is
    answered with the seconds of their calls, None ends them. period: seconds from call to call."""
    asyncio.run(_agents(control, runs, period))


async def _agents(control: Connection, runs: Sequence[tuple[str, str]], period: float) -> None:
    seconds: list[float] = []
    working = asyncio.Event()
    limits = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session:
        agents = [
            asyncio.ensure_future(_agent(session, url, key, period, working, seconds))
            for url, key in runs
        ]
        while (order := await asyncio.to_thread(control.recv)) is not None:
            if order:
                seconds.clear()
                working.set()
            else:
                working.clear()
                control.send(list(seconds))
        for agent in agents:
            agent.cancel()


async def _agent(
    session: aiohttp.ClientSession,
    url: str,
    key: str,
    period: float,
    working: asyncio.Event,
    seconds: list[float],
) -> None:
    draw = random.Random(key)
    messages: list[dict[str, str]] = []
    while True:
        await working.wait()
        await asyncio.sleep(draw.uniform(0.0, 2 * period))
        await working.wait()
        if len(messages) >= 2 * TURNS:
            messages = []
        messages.append({"role": "user", "content": f"{key} {len(messages)}: {RESULT}"})
        body = {"model": "policy", "messages": messages}
        start = time.perf_counter()
        async with session.post(
            f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
        seconds.append(time.perf_counter() - start)
        messages.append(answer["choices"][0]["message"])


class Endpoint:
    """An endpoint with open runs, in an event loop of its own, as in a trainer."""

    def __init__(self, num_runs: int) -> None:
        from megatron_gspo.agents.agent_run import RunLimits
        from megatron_gspo.agents.endpoint import AgentEndpoint
        from megatron_gspo.agents.rendering import TemplateRendering
        from megatron_gspo.servers.http_client import EventLoop
        from tests.support.chat_tokenizer import chat_tokenizer

        tokenizer = chat_tokenizer()
        end_token = tokenizer.eos_token_id
        self.engine = FakeEngine(end_token)
        self.loop = EventLoop()
        self.endpoint = AgentEndpoint(TemplateRendering(tokenizer, [end_token]))
        most = 10**9
        limits = RunLimits(max_calls=most, max_run_tokens=most)
        self.loop.run(self.endpoint.start())
        opened = [self._open(limits, seed) for seed in range(num_runs)]
        self.runs = [(self.endpoint.base_url(run), run.key) for run in opened]

    def _open(self, limits: Any, seed: int) -> Any:
        async def open_run() -> Any:
            return self.endpoint.open_run(self.engine, limits, seed=seed)

        return self.loop.run(open_run())

    def close(self) -> None:
        self.loop.run(self.endpoint.close())
        self.loop.close()


def training_step(folder: str) -> Any:
    """Forward and backward of a mini-batch."""
    import torch

    from benchmarks.step_vs_megatron import Size, contestants, write_model
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    torch.set_num_threads(1)
    groups = initialize(ParallelConfig(), seed=0)
    write_model(folder, None)
    return contestants(folder, Size(64, 8, 24), groups)["ours"]


class Measurement:
    """Turns with and without agents. calls, engine: seconds of the calls as the agents see them,
    and of the fake engine alone."""

    def __init__(self, control: Connection, endpoint: Endpoint, *, seconds: float) -> None:
        self.calls: list[float] = []
        self.engine: list[float] = []
        self.cpu_per_call: list[float] = []
        self._control = control
        self._endpoint = endpoint
        self._seconds = seconds

    def turn(self, work: Any, *, agents: bool) -> float:
        """Mean seconds of a piece of work over a turn. work: None waits."""
        self._endpoint.engine.seconds.clear()
        if agents:
            self._control.send(True)
        cpu = time.process_time() - time.thread_time()
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < self._seconds:
            if work is None:
                time.sleep(0.1)
            else:
                work()
            count += 1
        seconds = (time.perf_counter() - start) / count
        cpu = time.process_time() - time.thread_time() - cpu
        if agents:
            self._control.send(False)
            calls = self._control.recv()
            self.calls += calls
            self.engine += self._endpoint.engine.seconds
            if calls:
                self.cpu_per_call.append(cpu / len(calls))
            time.sleep(1.0)  # for calls that are under way
        return seconds

    def report(self, what: str) -> None:
        """Print the calls."""
        added = statistics.median(self.calls) - statistics.median(self.engine)
        say(
            f"{what}: {len(self.calls)} calls, {1e3 * added:.1f} ms added at the median,"
            f" {1e3 * statistics.median(self.cpu_per_call):.1f} ms of CPU a call"
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--period", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="a turn (default: %(default)s)")
    args = parser.parse_args()
    endpoint = Endpoint(args.sessions)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    agents = context.Process(
        target=play_agents, args=(theirs, endpoint.runs, args.period), daemon=True
    )
    agents.start()
    with tempfile.TemporaryDirectory() as folder:
        step = training_step(folder)
        step()
        machine = hardware()
        say(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']:.1f}")
        idle = Measurement(ours, endpoint, seconds=2 * args.seconds)
        idle.turn(None, agents=True)
        idle.report("the trainer waits")
        busy = Measurement(ours, endpoint, seconds=args.seconds)
        taken = by_turns(
            {
                "with": lambda: busy.turn(step, agents=True),
                "without": lambda: busy.turn(step, agents=False),
            },
            repeats=args.turns,
            seconds=600.0,
        )
    busy.report("the trainer works")
    ratio = statistics.median(a / b for a, b in zip(taken["with"], taken["without"], strict=True))
    say(f"a step of {1e3 * statistics.median(taken['without']):.0f} ms takes {ratio:.3f} times it")
    ours.send(None)
    agents.join()
    endpoint.close()


if __name__ == "__main__":
    main()
