"""Agents as programs of their own: how they end, and what that makes of their run."""

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_gspo.agents.agent_session import FinishedRun, Outcome, play
from megatron_gspo.agents.runner import AgentProgram
from megatron_gspo.errors import InputError
from tests.support import stdlib_agent
from tests.support.agent_endpoint import Serving, in_event_loop, serving

AGENT = Path(str(stdlib_agent.__file__))
ENV = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{key}", "TASK": "{prompt}"}


async def played(served: Serving, directory: Path, *steps: str, **settings) -> FinishedRun:
    """A run of the agent without packages."""
    program = AgentProgram((sys.executable, str(AGENT), *steps), ENV, **settings)
    return await play_program(served, program, directory, {"prompt": "list"})


async def play_program(
    served: Serving, program: AgentProgram, directory: Path, task: dict[str, Any]
) -> FinishedRun:
    return await play(served.endpoint, served.open_run(seed=3), program, directory, task=task)


def reply(prompt: str, seed: int) -> str:
    return f"reply {seed}"


@in_event_loop
async def test_an_agent_that_ends_with_a_reward(tmp_path: Path) -> None:
    async with serving(reply) as served:
        run = await played(served, tmp_path / "run", "call", "call", "reward=0.5")
        assert (run.outcome, run.exit.code) == (Outcome(0.5), 0)
        assert [len(row.turns) for row in run.rows] == [2]
        assert not (tmp_path / "run").exists()


@in_event_loop
async def test_a_deterministic_agent_has_the_same_run_again(tmp_path: Path) -> None:
    """As after a kill: bit by bit, with the same ids, whatever else has run in between."""
    runs = []
    for others in range(2):
        async with serving(reply) as served:
            for number in range(others):
                await played(served, tmp_path / f"other{number}", "call")
            runs.append(await played(served, tmp_path / "run", "call", "call", "reward=1"))
    first, second = (run.rows[0] for run in runs)
    assert first.tokens.tobytes() == second.tokens.tobytes()
    assert first.log_probs is not None and second.log_probs is not None
    assert first.log_probs.tobytes() == second.log_probs.tobytes()


@pytest.mark.parametrize(
    "steps, reward, failure",
    [
        (["call", "reward=1", "exit=1"], 1.0, ""),
        (["call", "exit=1"], math.nan, "error: the agent ended without a reward (exit code 1)"),
        (["call"], math.nan, "error: the agent ended without a reward (exit code 0)"),
        (["reward=1"], math.nan, "error: the agent made no call (exit code 0)"),
        (["exit=1"], math.nan, "error: the agent made no call (exit code 1)"),
    ],
)
@in_event_loop
async def test_exit_1_after_a_reward_before_one_zero_calls(
    tmp_path: Path, steps: list[str], reward: float, failure: str
) -> None:
    async with serving(reply) as served:
        run = await played(served, tmp_path / "run", *steps)
        assert run.outcome.reward == pytest.approx(reward, nan_ok=True)
        assert run.outcome.failure == failure


@in_event_loop
async def test_agent_never_ends_forks_a_daemon(tmp_path: Path) -> None:
    """It is killed with its children, although it ignores SIGTERM, and is unscored; others go
    on."""
    file = tmp_path / "daemon"
    steps = ["ignore_sigterm", "call", f"daemon={file}", "hang"]
    async with serving(reply) as served:
        hanging, other = await asyncio.gather(
            played(served, tmp_path / "one", *steps, run_timeout=10.0, kill_after=0.5),
            played(served, tmp_path / "two", "call", "reward=1"),
        )
        assert hanging.exit.timed_out and math.isnan(hanging.outcome.reward)
        assert hanging.outcome.failure == "timeout: the agent ran for 10 s without a reward"
        assert [len(row.turns) for row in hanging.rows] == [1]
        assert not psutil.pid_exists(int(file.read_text()))
        assert other.outcome.reward == 1.0
        assert not served.endpoint._runs.keys() - {served.run.number}


@in_event_loop
async def test_the_time_limit_stands_still_while_calls_are_paused(tmp_path: Path) -> None:
    """As while the trainer works. A program takes longer than the limit to start."""
    async with serving(reply) as served:
        served.generator.paused = True
        run = await played(served, tmp_path / "run", "call", "reward=1", run_timeout=0.01)
        assert run.outcome == Outcome(1.0)
        served.generator.paused = False
        run = await played(served, tmp_path / "again", "call", "reward=1", run_timeout=0.01)
        assert run.exit.timed_out


@in_event_loop
async def test_a_daemon_does_not_outlive_an_agent_that_ends(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    async with serving(reply) as served:
        run = await played(served, tmp_path / "run", "call", f"daemon={file}", "reward=1")
        assert (run.exit.code, run.outcome.reward) == (0, 1.0)
        assert not psutil.pid_exists(int(file.read_text()))


@in_event_loop
async def test_the_environment_is_clean(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    file = tmp_path / "environment"
    async with serving(reply) as served:
        await played(served, tmp_path / "run", f"environment={file}")
    seen = json.loads(file.read_text())
    known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR", *ENV}
    assert set(seen["env"]) <= known | {"SSL_CERT_FILE", "SSL_CERT_DIR", "__CF_USER_TEXT_ENCODING"}
    assert seen["directory"] == seen["env"]["HOME"] == str(tmp_path / "run")
    assert seen["env"]["TASK"] == "list"


@in_event_loop
async def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    async with serving(reply) as served:
        running = asyncio.ensure_future(played(served, tmp_path / "run", "hang"))
        lines: list[list[str]] = []
        while not any(str(AGENT) in line for line in lines):
            await asyncio.sleep(0.05)
            children = psutil.Process().children(recursive=True)
            lines = [child.cmdline() for child in children if child.is_running()]
        keys = [run.key for run in served.endpoint._runs.values()]
        assert len(keys) == 2
        assert not any(key in argument for line in lines for argument in line for key in keys)
        running.cancel()


@in_event_loop
async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    async with serving(reply) as served:
        program = AgentProgram(("no-such-agent", "{prompt}"), ENV)
        run = await play_program(served, program, tmp_path / "run", {"prompt": "list"})
        assert run.exit.code == 127
        assert run.exit.tail == "no-such-agent: cannot be started: no such file or directory"
        assert run.outcome.failure == (
            "error: the agent made no call (exit code 127: no-such-agent: cannot be started: no"
            " such file or directory)"
        )


@in_event_loop
async def test_cancelling_ends_the_program(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    async with serving(reply) as served:
        running = asyncio.ensure_future(
            played(served, tmp_path / "run", f"daemon={file}", "hang", kill_after=0.5)
        )
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not psutil.pid_exists(int(file.read_text()))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [(), ("agent", "--key={key}")])
def test_commands_that_are_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="agents.command"):
        AgentProgram(command)


@in_event_loop
async def test_braces_that_are_no_names_stay(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    write = f"import os; open({str(file)!r}, 'w').write(os.environ['SCHEMA'])"
    async with serving(reply) as served:
        program = AgentProgram(
            (sys.executable, "-c", write), {"SCHEMA": '{"a": {"b": "{prompt}"}, {unknown}'}
        )
        await play_program(served, program, tmp_path / "run", {"prompt": "{key}"})
    assert file.read_text() == '{"a": {"b": "{key}"}, {unknown}'
    assert os.getcwd() != str(tmp_path / "run")
