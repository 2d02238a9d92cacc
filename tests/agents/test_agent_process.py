"""The process that hosts a rank's agents: it plays as a host in this process does, and ends."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_gspo.agents.agent_host import OpenRun
from megatron_gspo.agents.agent_process import AgentProcess
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.generation import Generation
from megatron_gspo.agents.host_settings import HostSettings
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.runner import AgentProgram
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError, InputError
from megatron_gspo.rewards.scorer import RewardScorer
from tests.agents.test_agent_host import AGENT, ENV, played, reply, request
from tests.support.agent_endpoint import TOKENIZER, in_event_loop
from tests.support.interrupts import hear_interrupts
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.waiting import wait_for

# One process serves several tests, so the data say what each agent does.
STEPS = ("sh", "-c", f"exec {sys.executable} {AGENT} $STEPS")
PROGRAM = AgentProgram(
    STEPS, ENV | {"STEPS": "{metadata.steps}"}, run_timeout=300.0, kill_after=0.5
)


def settings(**others: object) -> HostSettings:
    given = {
        "rendering": functools.partial(TemplateRendering, TOKENIZER, [TOKENIZER.eos_token_id]),
        "agent": functools.partial(AgentProgram, **vars(PROGRAM)),
        "limits": RunLimits(),
        "concurrent_runs": 8,
    }
    return HostSettings(**given | others)


@asynccontextmanager
async def hosting(**others: object) -> AsyncIterator[AgentProcess]:
    process = AgentProcess(settings(**others))
    try:
        yield process
    finally:
        await process.close()
        assert not psutil.pid_exists(process.process_id)


def scripted() -> ScriptedGenerator:
    return ScriptedGenerator(TOKENIZER, reply)


def same(sample: Sample, other: Sample) -> None:
    for name, value in vars(sample).items():
        np.testing.assert_equal(getattr(other, name), value, err_msg=name)


def processes_of(process: AgentProcess) -> list[psutil.Process]:
    keeper = psutil.Process(process.process_id)
    return [keeper, *keeper.children(recursive=True)]


async def until_written(file: Path) -> int:
    while not file.exists() or not file.read_text():
        await asyncio.sleep(0.02)
    return int(file.read_text())


@in_event_loop
async def test_it_plays_as_a_host_in_this_process(tmp_path: Path) -> None:
    """Bit by bit, while runs that are not wanted any more end, and runs that fail do."""
    requests = [
        request(0, steps="call call reward=1"),
        request(0, 1, steps="call reward=0.5"),
        request(1, steps="exit=3"),
    ]
    expected = await played(PROGRAM, *requests, generator=scripted())
    async with hosting(nice=2) as process:
        [_, child, *_] = processes_of(process)
        libraries = Path(f"/proc/{child.pid}/maps").read_text()
        assert "libtorch" not in libraries and "libcuda" not in libraries

        unwanted = scripted()
        unwanted.gate.clear()
        opened: list[OpenRun] = []
        daemon = tmp_path / "daemon"
        ask = request(7, steps=f"daemon={daemon} call")
        waiting = asyncio.ensure_future(process.samples([ask], unwanted, 40, opened=opened))
        pid = await until_written(daemon)
        nice = min(psutil.Process().nice() + 2, 19)
        assert child.nice() == psutil.Process(pid).nice() == nice

        opened_here: list[OpenRun] = []
        generator = scripted()
        generator.version = 3
        generator.next_version = 5
        samples = await process.samples(requests, scripted(), 40)
        for sample, other in zip(samples, expected, strict=True):
            same(sample, other)
        [sample] = await process.samples(requests[:1], generator, 40, opened=opened_here)
        [runs] = opened_here
        assert sample.weight_version == runs.oldest_version == 3
        assert runs.num_tokens == sample.loss_mask.sum()

        while not unwanted.calls:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not psutil.pid_exists(pid), "its agent has ended"
        [runs] = opened
        assert (runs.oldest_version, runs.num_tokens) == (None, 0)
        waiting = asyncio.ensure_future(process.samples([ask], unwanted, 40))
        await asyncio.sleep(0)  # it is stopped before it begins
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@in_event_loop
async def test_errors_are_those_of_the_generator() -> None:
    async with hosting() as process:
        failing = scripted()
        error = EngineError("out of memory")
        failing.failures = [error]
        with pytest.raises(EngineError) as raised:
            await process.samples([request(steps="call"), request(1, steps="hang")], failing, 40)
        assert raised.value is error

        class Bug(ScriptedGenerator):
            async def generate(self, *arguments: object, **named: object) -> Generation:
                raise KeyError("a bug")

        with pytest.raises(KeyError, match="a bug"):
            await process.samples([request(steps="call")], Bug(TOKENIZER, reply), 40)


def test_settings_that_can_t_be_used_are_refused() -> None:
    made = settings(agent=functools.partial(AgentProgram, ()))
    with pytest.raises(InputError, match="^agents.command is empty"):
        AgentProcess(made)


@in_event_loop
async def test_a_verifier_scores_there(tmp_path: Path) -> None:
    file = tmp_path / "verifier.py"
    file.write_text("import os\ndef score(text, prompt):\n    return os.getppid()\n")
    scorer = functools.partial(RewardScorer, f"{file}:score", timeout=None)
    async with hosting(verifier=scorer) as process:
        [sample] = await process.samples([request(steps="call")], scripted(), 40)
        assert sample.reward == process.process_id


@in_event_loop
async def test_its_death_fails_the_runs_in_one_line(tmp_path: Path) -> None:
    async with hosting() as process:
        daemon = tmp_path / "daemon"
        steps = f"ignore_sigterm daemon={daemon} hang"
        playing = asyncio.ensure_future(process.samples([request(steps=steps)], scripted(), 40))
        pid = await until_written(daemon)
        [_, child, *agents] = processes_of(process)
        child.kill()
        for _ in range(2):
            with pytest.raises(EngineError, match="^agents: .* has ended .killed by SIGKILL.; "):
                await playing
            playing = asyncio.ensure_future(process.samples([request()], scripted(), 40))
        assert not psutil.pid_exists(pid)
        assert not any(agent.is_running() for agent in agents)
        playing.cancel()


TRAINER = """
import asyncio, sys
from tests.agents.test_agent_process import hosting, request, scripted
async def train():
    async with hosting() as process:
        print(process.process_id, flush=True)
        await process.samples([request(steps=sys.argv[1])], scripted(), 40)
asyncio.run(train())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_death_of_the_trainer_leaves_no_process(tmp_path: Path, number: int) -> None:
    """Ctrl-C goes to the trainer's whole process group, and the trainer ends by it."""
    daemon = tmp_path / "daemon"
    steps = f"ignore_sigterm daemon={daemon} hang"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, steps],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    assert trainer.stdout is not None
    keeper = psutil.Process(int(trainer.stdout.readline()))
    pid = int(wait_for(lambda: daemon.exists() and daemon.read_text()))
    started = [keeper, *keeper.children(recursive=True), psutil.Process(pid)]
    os.killpg(trainer.pid, number)
    trainer.wait()
    trainer.stdout.close()
    assert len(started) > 4
    wait_for(lambda: not any(process.is_running() for process in started))
