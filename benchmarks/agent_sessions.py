"""What 200 agents at the same time cost: the latency that the endpoint adds to a call, the CPU time
of a call in the trainer and in the process that hosts the agents, and how much slower a training
step becomes.

The engine is a fake in the trainer that replies after a fixed time with 64 tokens. Agents are
runners in another process, which keep their runs.
Each waits most of the time, as for its tools: it makes a call every 10 s, so that 200 make 20 a
second. A call adds a tool's result of about 60 tokens to a history of up to 16 turns. The step is a
forward and backward pass of a tiny model in the main thread, with one thread of torch.

On busy cores the step waits for a core too. The time in which it is blocked, as by the interpreter's
lock, leaves that out.

    OMP_NUM_THREADS=1 python benchmarks/agent_sessions.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import numpy as np
import psutil

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


def play_agents(control: Connection, address_file: Path, count: int, period: float) -> None:
    """Agents, in a process of their own. control: gets the word when all have a run; True lets them
    work, False makes them wait and is answered with the seconds of their calls, None ends them.
    period: seconds from call to call."""
    asyncio.run(_agents(control, address_file, count, period))


async def _agents(control: Connection, address_file: Path, count: int, period: float) -> None:
    seconds: list[float] = []
    working = asyncio.Event()
    limits = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session:
        runs = [await _claimed(session, address_file) for _ in range(count)]
        control.send("all have a run")
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


async def _claimed(session: aiohttp.ClientSession, address_file: Path) -> tuple[str, str]:
    """Address and key of a run."""
    while True:
        if address_file.exists():
            address = json.loads(address_file.read_text())
            headers = {"Authorization": f"Bearer {address['key']}"}
            async with session.post(f"{address['url']}/tasks/claim", headers=headers) as answer:
                task = (await answer.json())["task"]
            if task is not None:
                return task["base_url"], task["key"]
        await asyncio.sleep(0.1)


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


def host_settings(address_file: Path, num_runs: int) -> tuple[Any, int]:
    """(`HostSettings` of runs that last, end token)."""
    from megatron_gspo.agents.agent_run import RunLimits
    from megatron_gspo.agents.host_settings import HostSettings, Runners
    from megatron_gspo.agents.rendering import TemplateRendering
    from tests.support.chat_tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer()
    end_token = tokenizer.eos_token_id
    most = 10**9
    settings = HostSettings(
        partial(TemplateRendering, tokenizer, [end_token]),
        Runners(address_file, lease=most, run_timeout=most),
        RunLimits(max_calls=most, max_run_tokens=most),
        concurrent_runs=num_runs,
    )
    return settings, end_token


class Hosted:
    """Open runs and the fake engine, whose calls come to an event loop as in a trainer."""

    def __init__(self, host: Any, end_token: int, num_runs: int) -> None:
        """host: a `RunHost`."""
        from megatron_gspo.agents.agent_host import RunRequest
        from megatron_gspo.data.sample import Prompt
        from megatron_gspo.servers.http_client import EventLoop

        self.engine = FakeEngine(end_token)
        self._host = host
        self._loop = EventLoop()
        prompts = [Prompt(i, np.array([1]), "a task") for i in range(num_runs)]
        requests = [RunRequest(prompt, 0, seed=0) for prompt in prompts]
        self._playing = self._loop.spawn(host.samples(requests, self.engine, 4096))

    def close(self) -> None:
        self._playing.cancel()
        self._loop.run(self._host.close())
        self._loop.close()


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
    and of the fake engine alone. cpu_per_call, hosting_cpu_per_call: of the trainer's threads but
    the main one, and of the process that hosts the agents. blocked: seconds a step in which the main
    thread neither runs nor waits for a core, with agents (True) and without."""

    def __init__(
        self, control: Connection, hosted: Hosted, hosting: list[psutil.Process], *, seconds: float
    ) -> None:
        """hosting: the processes that host the agents."""
        self.calls: list[float] = []
        self.engine: list[float] = []
        self.cpu_per_call: list[float] = []
        self.hosting_cpu_per_call: list[float] = []
        self.blocked: dict[bool, list[float]] = {True: [], False: []}
        self._control = control
        self._hosted = hosted
        self._hosting = hosting
        self._seconds = seconds

    def turn(self, work: Any, *, agents: bool) -> float:
        """Mean seconds of a piece of work over a turn. work: None waits."""
        self._hosted.engine.seconds.clear()
        if agents:
            self._control.send(True)
        cpu = time.process_time() - time.thread_time()
        hosting_cpu = self._hosting_seconds()
        scheduled = _scheduled_seconds()
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < self._seconds:
            if work is None:
                time.sleep(0.1)
            else:
                work()
            count += 1
        seconds = time.perf_counter() - start
        self.blocked[agents].append((seconds - (_scheduled_seconds() - scheduled)) / count)
        cpu = time.process_time() - time.thread_time() - cpu
        hosting_cpu = self._hosting_seconds() - hosting_cpu
        if agents:
            self._control.send(False)
            calls = self._control.recv()
            self.calls += calls
            self.engine += self._hosted.engine.seconds
            if calls:
                self.cpu_per_call.append(cpu / len(calls))
                self.hosting_cpu_per_call.append(hosting_cpu / len(calls))
            time.sleep(1.0)  # for calls that are under way
        return seconds / count

    def report(self, what: str) -> None:
        """Print the calls."""
        added = statistics.median(self.calls) - statistics.median(self.engine)
        ours = statistics.median(self.cpu_per_call)
        others = statistics.median(self.hosting_cpu_per_call)
        say(
            f"{what}: {len(self.calls)} calls, {1e3 * added:.1f} ms added at the median,"
            f" {1e3 * ours:.2f} ms of the trainer's CPU a call and {1e3 * others:.1f} ms of the"
            " hosting process"
        )

    def _hosting_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._hosting)


def _scheduled_seconds() -> float:
    """Seconds in which this thread has run or has waited for a core."""
    running, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(running) + int(waiting)) / 1e9


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
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Print the measurements."""
    from megatron_gspo.agents.agent_process import AgentProcess

    address_file = folder / "address.json"
    settings, end_token = host_settings(address_file, args.sessions)
    process = AgentProcess(settings)
    hosting = psutil.Process(process.process_id).children()
    hosted = Hosted(process, end_token, args.sessions)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    agents = context.Process(
        target=play_agents, args=(theirs, address_file, args.sessions, args.period), daemon=True
    )
    agents.start()
    ours.recv()
    step = training_step(str(folder / "model"))
    step()
    machine = hardware()
    say(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']:.1f}")
    idle = Measurement(ours, hosted, hosting, seconds=2 * args.seconds)
    idle.turn(None, agents=True)
    idle.report("the trainer waits")
    busy = Measurement(ours, hosted, hosting, seconds=args.seconds)
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
    blocked, blocked_alone = (1e3 * statistics.median(busy.blocked[on]) for on in (True, False))
    say(f"it is blocked for {blocked:.1f} ms, and for {blocked_alone:.1f} ms without agents")
    ours.send(None)
    agents.join()
    hosted.close()


if __name__ == "__main__":
    main()
