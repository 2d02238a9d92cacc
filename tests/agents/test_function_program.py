"""Functions as agents: their file is imported once, and each run is a process of its own."""

import asyncio
import math
import os
import signal
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from megatron_gspo.agents.agent_session import FinishedRun, play
from megatron_gspo.agents.function_program import FunctionProgram
from megatron_gspo.agents.runner import CLIENT_ENV
from tests.support.agent_endpoint import Serving, in_event_loop, serving

CALL = "from examples.agents.spell_backward import chat as call\n"


def reply(prompt: str, seed: int) -> str:
    return "yes"


@asynccontextmanager
async def agent_of(folder: Path, code: str, env=None, **settings) -> AsyncIterator[FunctionProgram]:
    """The function `run` of a file with this code."""
    file = folder / "agent.py"
    file.write_text(CALL + code)
    program = FunctionProgram(f"{file}:run", CLIENT_ENV | (env or {}), **settings)
    try:
        yield program
    finally:
        await program.close()


async def played(
    served: Serving, program: FunctionProgram, directory: Path, index: int = 0
) -> FinishedRun:
    task = {"prompt": "list", "index": index, "sample": 0, "seed": 1}
    return await play(served.endpoint, served.open_run(seed=3), program, directory, task=task)


COUNTS = """
import os
imports = open({file!r}, "a").write("imported\\n")
runs = 0
def run(task):
    global runs
    runs += 1
    assert os.getcwd() == os.environ["HOME"] == task.directory
    assert os.environ["OPENAI_API_KEY"] == task.key
    call(task, [dict(role="user", content=task.prompt)])
    return runs
"""


@in_event_loop
async def test_the_file_is_imported_once_and_each_run_begins_with_it(tmp_path: Path) -> None:
    file = tmp_path / "imports"
    async with serving(reply) as served, agent_of(tmp_path, COUNTS.format(file=str(file))) as agent:
        together = [played(served, agent, tmp_path / f"run-{i}") for i in range(3)]
        runs = await asyncio.gather(*together)
    assert [(run.outcome.reward, run.exit.code) for run in runs] == [(1.0, 0)] * 3
    assert file.read_text() == "imported\n"


@in_event_loop
async def test_the_environment_without_names_is_there_at_the_import(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "SEEN = dict(os.environ)\n"
        "def run(task):\n"
        "    print(SEEN.get('OFFLINE'), 'OPENAI_API_KEY' in SEEN)\n"
    )
    async with serving(reply) as served, agent_of(tmp_path, code, {"OFFLINE": "1"}) as agent:
        run = await played(served, agent, tmp_path / "run")
    assert run.exit.tail == "1 False"


@in_event_loop
async def test_an_error_of_the_function_is_the_end_of_its_output(tmp_path: Path) -> None:
    code = "def run(task):\n    call(task, [dict(role='user', content='a')])\n    raise ValueError('seven')"
    async with serving(reply) as served, agent_of(tmp_path, code) as agent:
        run = await played(served, agent, tmp_path / "run")
    assert run.outcome.failure == (
        "error: the agent ended without a reward (exit code 1: ValueError: seven)"
    )


HANGS = """
import signal, subprocess
def run(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({file!r}, "w").write(f"{{daemon.pid}}\\n")
    daemon.wait()
"""


async def daemon_of(file: Path) -> int:
    while not file.exists() or "\n" not in file.read_text():
        await asyncio.sleep(0.05)
    return int(file.read_text())


@in_event_loop
async def test_a_run_that_never_ends_is_ended(tmp_path: Path) -> None:
    code = "import time\ndef run(task):\n    while task.index:\n        time.sleep(600)\n"
    async with serving(reply) as served, agent_of(tmp_path, code, kill_after=0.5) as agent:
        assert not (await played(served, agent, tmp_path / "first")).exit.timed_out
        agent.run_timeout = 0.5
        run = await played(served, agent, tmp_path / "run", index=1)
    assert run.exit.timed_out and math.isnan(run.outcome.reward)


@in_event_loop
async def test_cancelling_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    code = HANGS.format(file=str(file))
    async with serving(reply) as served, agent_of(tmp_path, code, kill_after=0.5) as agent:
        running = asyncio.ensure_future(played(served, agent, tmp_path / "run"))
        daemon = await daemon_of(file)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not psutil.pid_exists(daemon)
        assert not (tmp_path / "run").exists()


@in_event_loop
async def test_a_server_that_dies_ends_its_runs_and_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    code = f"""
import os, subprocess
SERVER = os.getpid()
def run(task):
    call(task, [dict(role="user", content="a")])
    if os.path.exists({str(file)!r}):
        return 1
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({str(file)!r}, "w").write(f"{{daemon.pid}}\\n")
    os.kill(SERVER, {int(signal.SIGKILL)})
    daemon.wait()
"""
    async with serving(reply) as served, agent_of(tmp_path, code) as agent:
        first = await played(served, agent, tmp_path / "first")
        assert first.outcome.failure == "error: the agent ended without a reward (exit code 1)"
        again = await played(served, agent, tmp_path / "again")
        assert again.outcome.reward == 1.0
        while psutil.pid_exists(int(file.read_text())):
            await asyncio.sleep(0.05)


@in_event_loop
async def test_a_file_that_ends_its_process(tmp_path: Path) -> None:
    code = "import os\nprint('no licence', flush=True)\nos._exit(3)"
    async with serving(reply) as served, agent_of(tmp_path, code) as agent:
        run = await played(served, agent, tmp_path / "run")
    assert run.outcome.failure == "error: the agent made no call (exit code 1: no licence)"


@in_event_loop
async def test_a_file_that_is_imported_for_ever(tmp_path: Path) -> None:
    code = "import time\ntime.sleep(600)\n"
    async with serving(reply) as served, agent_of(tmp_path, code, run_timeout=1.0) as agent:
        run = await played(served, agent, tmp_path / "run")
    assert "agent.py:run took more than 1 s (agents.run_timeout))" in run.outcome.failure


@in_event_loop
async def test_another_interpreter_has_its_own_packages(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder)
    code = (
        "import importlib.util, sys\n"
        "def run(task):\n"
        "    print(sys.prefix, importlib.util.find_spec('numpy'), end=' ')\n"
        "    import megatron_gspo.agents.agent_function\n"
    )
    (tmp_path / "agent.py").write_text(code)
    program = FunctionProgram(
        f"{tmp_path}/agent.py:run", CLIENT_ENV, python=str(folder / "bin" / "python")
    )
    async with serving(reply) as served:
        try:
            run = await played(served, program, tmp_path / "run")
        finally:
            await program.close()
    assert run.exit.tail == f"{os.path.realpath(folder)} None"
