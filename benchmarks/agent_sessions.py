"""What 200 agents at the same time cost: the latency that the endpoint adds to a call, the CPU time
of a call in the trainer and in the process that hosts the agents, and how much slower a training
step becomes.

The engine is a fake SGLang server that replies after a fixed time with 64 tokens. What a call takes
beyond that includes the agent's own client, which is measured alone too. Agents are runners in
another process, which keep their runs. Each waits most of the time, as for its tools: it makes a
call every 10 s, so that 200 make 20 a second. A call adds a tool's result of about 60 tokens to a
history of up to 16 turns. The step is a forward and backward pass of a tiny model in the main
thread, with one thread of torch.

The control is the same agents on a server that has nothing to do with the trainer, answers at once
with a constant and burns as much CPU time a call as the process that hosts the agents and the fake
engine. What it costs the step is the price of two busy cores; what the agents cost beyond it is
that of this program. The wall time of a step has three parts (`schedstat` of /proc): its thread
runs, it waits for a core, or it is blocked, as by the interpreter's lock.

    OMP_NUM_THREADS=1 python benchmarks/agent_sessions.py
    OMP_NUM_THREADS=1 python benchmarks/agent_sessions.py --apart    # the trainer on a core of its own
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import secrets
import selectors
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import numpy as np
import psutil
from aiohttp import web

from benchmarks.common import by_turns, hardware, say

TURNS = 16
REPLY_TOKENS = 64
REPLY_SECONDS = 0.05
CONTROL_SECONDS = 0.0008  # CPU time of a call to the control's server that burns none
VERSION = "00c0ffee:1"  # of the engine's weights
GENERATE = b"/generate"
COMPLETE = b"/v1/chat/completions"
RESULT = "the command has printed this line and nothing else"


class FakeEngine(asyncio.Protocol):
    """A connection to a server that answers each path with a constant, and takes next to no CPU
    time itself. Replies take `REPLY_SECONDS`."""

    def __init__(self, answers: Mapping[bytes, bytes]) -> None:
        self._answers = answers
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not separator or len(body) < int(length[1] if length else 0):
            return
        self._received = b""
        path = head.split(b" ", 2)[1]
        answer = self._answers[path]
        seconds = REPLY_SECONDS if path in (GENERATE, COMPLETE) else 0.0
        asyncio.get_running_loop().call_later(seconds, self._transport.write, answer)


def serve_engine(control: Connection, address_file: Path, end_token: int, nice: int) -> None:
    """The fake engine, in a process of its own, which agents can also call directly. control: gets
    its address."""
    os.nice(nice)
    tokens = [*range(65, 65 + REPLY_TOKENS - 1), end_token]
    meta_info = {
        "finish_reason": {"type": "stop"},
        "weight_version": VERSION,
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }

    async def serve() -> None:
        answers: dict[bytes, bytes] = {}
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: FakeEngine(answers), "127.0.0.1", 0, backlog=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        message = {"role": "assistant", "content": "A" * REPLY_TOKENS}
        for path, body in {
            GENERATE: {"output_ids": tokens, "meta_info": meta_info},
            COMPLETE: {"choices": [{"message": message}]},
            b"/model_info": {"weight_version": VERSION},
            b"/tasks/claim": {"task": {"base_url": f"{url}/v1", "key": "direct"}},
        }.items():
            answers[path] = _http(json.dumps(body))
        address_file.write_text(json.dumps({"url": url, "key": "direct"}))
        control.send(url)
        await server.serve_forever()

    # `epoll` would round the time of a reply up to milliseconds.
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        runner.run(serve())


def play_agents(
    control: Connection, address_file: Path, count: int, period: float, nice: int
) -> None:
    """Agents, in a process of their own. control: gets the word when all have a run; True lets them
    work, False makes them wait and is answered with the seconds of their calls, None ends them.
    period: seconds from call to call."""
    os.nice(nice)  # as the children of the process that hosts them
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
            asyncio.ensure_future(_agent(number, session, url, key, period, working, seconds))
            for number, (url, key) in enumerate(runs)
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
    number: int,
    session: aiohttp.ClientSession,
    url: str,
    key: str,
    period: float,
    working: asyncio.Event,
    seconds: list[float],
) -> None:
    draw = random.Random(number)
    messages: list[dict[str, str]] = []
    while True:
        await working.wait()
        await asyncio.sleep(draw.expovariate(1 / period))  # without a memory of earlier turns
        if not working.is_set():
            continue
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


def serve_control(control: Connection, address_file: Path, nice: int) -> None:
    """The server of the control, in a process of its own. control: sends the seconds of CPU time
    that a call burns; None ends it."""
    os.nice(nice)
    asyncio.run(_control(control, address_file))


async def _control(control: Connection, address_file: Path) -> None:
    burnt = 0.0
    message = {"role": "assistant", "content": "A" * REPLY_TOKENS}

    async def claim(request: web.Request) -> web.Response:
        url = f"http://{request.host}/v1"
        return web.json_response({"task": {"base_url": url, "key": secrets.token_hex(16)}})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        end = time.thread_time() + burnt
        while time.thread_time() < end:
            json.dumps(body)
        await asyncio.sleep(REPLY_SECONDS)
        return web.json_response({"choices": [{"message": message}]})

    application = web.Application()
    application.router.add_post("/tasks/claim", claim)
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    address_file.write_text(json.dumps({"url": f"http://{host}:{port}", "key": "control"}))
    while (order := await asyncio.to_thread(control.recv)) is not None:
        burnt = order
    await runner.cleanup()


def host_settings(address_file: Path, num_runs: int, nice: int) -> tuple[Any, int]:
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
        nice=nice,
    )
    return settings, end_token


def _http(body: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n{body}".encode()


def client_of(url: str, process: Any, end_token: int, num_runs: int) -> Any:
    """The trainer's `RolloutClient` of the engine, with open runs. process: `AgentProcess`."""
    from megatron_gspo.agents.agent_source import AgentGroups
    from megatron_gspo.config import SamplingParams, ServerConfig
    from megatron_gspo.data.sample import Prompt
    from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
    from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
    from tests.support.served_models import served_model

    model = served_model(vocab_size=end_token + 1, stop_ids=(end_token,))
    client = RolloutClient([url], ServerConfig(), model, str, api=SGLangAPI(), log=say)
    client.current_version = 1
    client.loop.run(client.pool.set_version(VERSION, client.pool.servers))
    prompts = [Prompt(i, np.array([1]), "a task") for i in range(num_runs)]
    client.stream(AgentGroups(process)).start(prompts, SamplingParams(1, 4096), seed=0)
    return client


async def _thread_number() -> int:
    return threading.get_native_id()


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


@dataclass(frozen=True)
class Load:
    """Agents that work or wait. control: of their process. server: that they call. engine: that
    the server calls."""

    control: Connection
    agents: psutil.Process
    server: psutil.Process
    engine: psutil.Process | None = None


class StepParts(NamedTuple):
    """Mean seconds of a step in which its thread runs, waits for a core and is blocked."""

    runs: float
    waits: float
    blocked: float

    @property
    def wall(self) -> float:
        return sum(self)


class Calls:
    """Calls of agents. seconds: as they see them. cpu: seconds of CPU time a call, one number a
    turn, of the server's process, the engine's, the agents', and the trainer's thread that hears of
    runs."""

    def __init__(self, trainer_thread: int) -> None:
        """trainer_thread: its system-wide number."""
        self._trainer_thread = trainer_thread
        self.seconds: list[float] = []
        self.cpu: dict[str, list[float]] = {
            name: [] for name in ("trainer", "server", "engine", "agents")
        }

    @property
    def servers_cpu(self) -> float:
        """The median of the server's and the engine's together."""
        return statistics.median(map(sum, zip(self.cpu["server"], self.cpu["engine"], strict=True)))

    def turn(self, load: Load, work: Callable[[], StepParts]) -> StepParts:
        """Do some work while the agents call."""
        before = self._cpu_seconds(load)
        load.control.send(True)
        parts = work()
        load.control.send(False)
        seconds = load.control.recv()
        after = self._cpu_seconds(load)
        count = max(len(seconds), 1)
        self.seconds += seconds
        for name, values in self.cpu.items():
            values.append((after[name] - before[name]) / count)
        time.sleep(1.0)  # for calls that are under way
        return parts

    def _cpu_seconds(self, load: Load) -> dict[str, float]:
        return {
            "trainer": _scheduled_seconds(self._trainer_thread)[0],
            "server": _cpu_seconds(load.server),
            "engine": 0.0 if load.engine is None else _cpu_seconds(load.engine),
            "agents": _cpu_seconds(load.agents),
        }

    def report(self, what: str) -> None:
        """Print the calls."""
        added = statistics.median(self.seconds) - REPLY_SECONDS
        cpu = ", ".join(
            f"{name} {1e3 * statistics.median(values):.2f} ms" for name, values in self.cpu.items()
        )
        say(
            f"{what}: {len(self.seconds)} calls, {1e3 * added:.1f} ms added at the median; CPU a"
            f" call: {cpu}"
        )


def steps(work: Callable[[], object], seconds: float) -> StepParts:
    """Repeat a piece of work for so long."""
    began = time.perf_counter()
    thread = threading.get_native_id()
    ran, waited = _scheduled_seconds(thread)
    count = 0
    while time.perf_counter() - began < seconds:
        work()
        count += 1
    wall = time.perf_counter() - began
    ran_now, waited_now = _scheduled_seconds(thread)
    ran = ran_now - ran
    waited = waited_now - waited
    return StepParts(ran / count, waited / count, (wall - ran - waited) / count)


def _scheduled_seconds(thread: int) -> tuple[float, float]:
    """Seconds in which a thread of this process has run, and has waited for a core."""
    running, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(running) / 1e9, int(waiting) / 1e9


def _cpu_seconds(process: psutil.Process) -> float:
    """Seconds in which the threads of a process have run."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--period", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--nice", type=int, default=10, help="of all but the trainer (default: %(default)s)"
    )
    parser.add_argument(
        "--apart", action="store_true", help="the trainer on one core, all else on the others"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="a turn (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Print the measurements."""
    from megatron_gspo.agents.agent_process import AgentProcess

    cores = sorted(os.sched_getaffinity(0))
    if args.apart:
        os.sched_setaffinity(0, cores[1:])  # of all that is started from here
    settings, end_token = host_settings(folder / "agents.json", args.sessions, args.nice)
    process = AgentProcess(settings)
    urls, theirs = multiprocessing.Pipe()
    engine = start(serve_engine, theirs, folder / "engine.json", end_token, args.nice)
    burns, theirs = multiprocessing.Pipe()
    server = start(serve_control, theirs, folder / "control.json", args.nice)
    loads = []
    for address_file, called, asked in (
        (folder / "agents.json", psutil.Process(process.process_id).children()[0], engine),
        (folder / "control.json", server, None),
        (folder / "engine.json", engine, None),
    ):
        control, theirs = multiprocessing.Pipe()
        agents = start(play_agents, theirs, address_file, args.sessions, args.period, args.nice)
        loads.append(Load(control, agents, called, asked))
    if args.apart:
        os.sched_setaffinity(0, cores[:1])
    client = client_of(urls.recv(), process, end_token, args.sessions)
    for load in loads:
        load.control.recv()
    step = training_step(str(folder / "model"))
    step()
    machine = hardware()
    say(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']:.1f}")
    trainer_thread = client.loop.run(_thread_number())
    idle = Calls(trainer_thread)
    direct = Calls(trainer_thread)
    for _ in range(2):
        idle.turn(loads[0], lambda: steps(lambda: time.sleep(0.1), args.seconds))
        direct.turn(loads[2], lambda: steps(lambda: time.sleep(0.1), args.seconds))
    idle.report("the trainer waits")
    direct.report("agents call the engine themselves")
    busy = Calls(trainer_thread)
    control_calls = Calls(trainer_thread)

    def with_agents() -> StepParts:
        return busy.turn(loads[0], lambda: steps(step, args.seconds))

    burnt = 0.0

    def with_control() -> StepParts:
        nonlocal burnt
        if control_calls.cpu["server"]:
            burnt += busy.servers_cpu - control_calls.cpu["server"][-1]
        else:
            burnt = idle.servers_cpu - CONTROL_SECONDS
        burns.send(burnt)
        return control_calls.turn(loads[1], lambda: steps(step, args.seconds))

    taken = by_turns(
        {
            "agents": with_agents,
            "control": with_control,
            "alone": lambda: steps(step, args.seconds),
        },
        repeats=args.turns,
        seconds=600.0,
    )
    busy.report("the trainer works")
    control_calls.report("control")
    for name, parts in taken.items():
        runs, waits, blocked = (
            1e3 * statistics.median(values) for values in zip(*parts, strict=True)
        )
        wall = 1e3 * statistics.median(part.wall for part in parts)
        say(
            f"a step, {name}: {wall:.1f} ms: runs {runs:.1f}, waits for a core {waits:.1f}, is"
            f" blocked {blocked:.2f}"
        )
    for ours, peer in (("agents", "alone"), ("control", "alone"), ("agents", "control")):
        ratio = statistics.median(
            a.wall / b.wall for a, b in zip(taken[ours], taken[peer], strict=True)
        )
        say(f"{ours} / {peer}: {ratio:.3f}")
    for load in loads:
        load.control.send(None)
    burns.send(None)
    client.close()


def start(function: Callable[..., None], *arguments: object) -> psutil.Process:
    """A function in a new process, which ends with this one."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return psutil.Process(process.pid)


if __name__ == "__main__":
    main()
