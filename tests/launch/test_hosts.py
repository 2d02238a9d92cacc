"""Training over two hosts with the launch scripts: they find each other, one loses power and comes back, and the run
ends bitwise as one on a single machine that was left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.tools.same_run import first_difference
from tests.bad_input.ranks import run_ranks
from tests.launch.hosts import Host, hosts, why_not
from tests.train.run import base_config, tiny_model

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "launch"
LIMIT = 120.0  # seconds


@pytest.fixture(scope="module")
def machines():
    """Two hosts."""
    if reason := why_not():
        pytest.skip(f"training over several hosts was not tested: {reason}")
    with hosts(2) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("hosts_model"))


def configure(model: str, run_dir: Path, steps: int = 5) -> Path:
    """Four processes: TP 2 on each host, data parallelism and the experts (EP 4) over both."""
    config = base_config(
        model,
        run_dir,
        parallel={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "timeout_minutes": 1.0},
        training={"steps": steps},
        evaluation={"at_start": False},
        checkpoint={"interval": 2},
    )
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def start():
    """`launch`, and the end of what it has started, where a test fails."""
    started: list[subprocess.Popen] = []

    def one(*arguments: Any, **settings: Any) -> subprocess.Popen:
        started.append(launch(*arguments, **settings))
        return started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends torchrun with it
            process.wait(60)


def launch(script: str, log: Path, arguments: list[str], on: Host | None = None, **settings: Any) -> subprocess.Popen:
    """A launch script, on a host or here; what it says goes to ``log``."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "LOG_DIR": str(log.parent / "logs"),
        **{name: str(value) for name, value in settings.items()},
    }
    environment.pop("GLOO_SOCKET_IFNAME", None)
    command = [str(SCRIPTS / script), *arguments]
    with log.open("a") as output:
        return subprocess.Popen(
            command if on is None else on.command(command), env=environment, stdout=output, stderr=output, cwd=ROOT
        )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, log: Path, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def test_a_host_loses_power_and_comes_back(machines, model, start, tmp_path):
    left_alone = run_ranks(yaml.safe_load(configure(model, tmp_path / "alone").read_text()), 4, tmp_path, limit=LIMIT)
    assert [rank.code for rank in left_alone] == [0] * 4

    config, run_dir = configure(model, tmp_path / "run"), tmp_path / "run"
    head, other = machines
    settings = dict(NODES=2, PROCESSES=2, HEAD=head.name, RESTARTS=1, PAUSE=1)
    logs = [tmp_path / "head.txt", tmp_path / "other.txt"]
    first = start("c10d.sh", logs[0], [str(config)], on=head, **settings)
    second = start("c10d.sh", logs[1], [str(config)], on=other, **settings)
    wait_for(lambda: lines(run_dir / "metrics.jsonl") >= 3, first, logs[0])
    assert other.kill() >= 4  # the script, torchrun and two ranks
    assert second.wait(10) != 0
    wait_for(lambda: "start 1 of 1 again" in logs[0].read_text(), first, logs[0])
    second = start("c10d.sh", logs[1], [str(config)], on=other, **settings)
    codes = [process.wait(LIMIT) for process in (first, second)]

    text = logs[0].read_text()
    assert codes == [0, 0], text[-3000:]
    assert "lost contact with another rank" in text and f"resumed from {run_dir}/checkpoints/step_000002" in text
    for host in machines:  # a log for each rank, in a folder of its host
        assert len(list((tmp_path / "logs" / host.name).glob("*/attempt_0/[01]/stderr.log"))) >= 2
    assert first_difference(run_dir, tmp_path / "alone") == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_scheduler_asks_the_script_to_stop(model, start, tmp_path, number):
    """Here and without namespaces: one process by static.sh, which says 75 until the run is finished."""
    run_dir, log = tmp_path / "run", tmp_path / "log.txt"
    one = ["parallel.tensor_model_parallel_size=1", "parallel.expert_model_parallel_size=1", "checkpoint.interval=0"]
    arguments = [str(configure(model, run_dir, steps=40)), *one]
    stopped = start("static.sh", log, arguments, PROCESSES=1)
    wait_for(lambda: lines(run_dir / "metrics.jsonl") >= 1, stopped, log)
    stopped.send_signal(number)
    assert stopped.wait(LIMIT) == 75, log.read_text()
    done = lines(run_dir / "metrics.jsonl")
    assert 1 <= done < 40 and f"stopped by SIGUSR1 after step {done}" in log.read_text()
    assert (run_dir / "checkpoints" / f"step_{done:06d}").is_dir()
    if number == signal.SIGUSR1:
        again = start("static.sh", log, [*arguments, f"training.steps={done + 1}"], PROCESSES=1)
        assert again.wait(LIMIT) == 0 and lines(run_dir / "metrics.jsonl") == done + 1, log.read_text()
