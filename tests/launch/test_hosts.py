"""Training over two hosts with the launch scripts: they find each other, one loses power and
restarts, and the run ends bitwise as one on a single machine that was left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bad_input.ranks import run_ranks
from tests.fault_injection.bitwise_diff import first_difference
from tests.support.interrupts import hear_interrupts
from tests.support.network_hosts import Host, hosts, why_not
from tests.support.ports import free_port
from tests.support.training_runs import base_config, tiny_model
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "launch"
LIMIT = 240.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def machines():
    """Two hosts."""
    if reason := why_not():
        pytest.skip(f"training over several hosts was not tested: {reason}")
    with hosts(2) as two_hosts:
        yield two_hosts


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("hosts_model"))


def configure(model: str, run_dir: Path, steps: int = 5) -> Path:
    """Four processes: TP 2 on each host, data parallelism and the experts (EP 4) over both."""
    config = base_config(
        model,
        run_dir,
        parallel={
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "distributed_timeout_minutes": 1.0,
        },
        training={"steps": steps},
        evaluation={"at_start": False},
        checkpoint={"save_interval": 2, "async_save": False},  # whole before the next step begins
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


def launch(
    script: str, log: Path, arguments: list[str], on: Host | None = None, **settings: Any
) -> subprocess.Popen:
    """A launch script, on a host or here; its output goes to ``log``."""
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
            command if on is None else on.command(command),
            env=environment,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            preexec_fn=hear_interrupts,
        )


def wait_in_run(condition: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    """The process must not end before."""
    wait_for(condition, LIMIT, alive=lambda: process.poll() is None, said=log.read_text)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def test_a_host_loses_power_and_comes_back(machines, model, start, tmp_path):
    left_alone = run_ranks(
        yaml.safe_load(configure(model, tmp_path / "alone").read_text()), 4, tmp_path, limit=LIMIT
    )
    assert [rank.code for rank in left_alone] == [0] * 4

    config = configure(model, tmp_path / "run")
    run_dir = tmp_path / "run"
    head, other = machines
    settings = dict(NODES=2, PROCESSES=2, HEAD=head.address, IFNAME="eth0", RESTARTS=1, PAUSE=1)
    logs = [tmp_path / "head.txt", tmp_path / "other.txt"]
    first = start("c10d.sh", logs[0], [str(config)], on=head, ADDRESS=head.address, **settings)
    second = start("c10d.sh", logs[1], [str(config)], on=other, ADDRESS=other.address, **settings)
    wait_in_run(lambda: lines(run_dir / "metrics.jsonl") >= 3, first, logs[0])
    assert other.kill() >= 4  # the script, torchrun and two ranks
    assert second.wait(10) != 0
    wait_in_run(lambda: "start 1 of 1 again" in logs[0].read_text(), first, logs[0])
    second = start("c10d.sh", logs[1], [str(config)], on=other, ADDRESS=other.address, **settings)
    codes = [process.wait(LIMIT) for process in (first, second)]

    text = logs[0].read_text()
    assert codes == [0, 0], text[-3000:]
    assert "lost contact with another rank" in text
    assert f"resumed from {run_dir}/checkpoints/step_000002" in text
    for host in machines:  # a log for each rank, in a folder of its host
        assert len(list((tmp_path / "logs" / host.name).glob("*/attempt_0/[01]/stderr.log"))) >= 2
    assert first_difference(run_dir, tmp_path / "alone") == ""


def configure_one(model: str, run_dir: Path) -> list[str]:
    """Many steps without a checkpoint, and no parallelism but data's."""
    overrides = [
        "parallel.tensor_model_parallel_size=1",
        "parallel.expert_model_parallel_size=1",
        "checkpoint.save_interval=0",
    ]
    return [str(configure(model, run_dir, steps=60)), *overrides]


@pytest.mark.slow
def test_one_script_is_asked_and_both_say_that_the_run_has_stopped(model, start, tmp_path):
    """Static rendezvous of two nodes, here and without namespaces; a scheduler's SIGTERM reaches
    the second. The first is told by our variables where to meet, the second by those of Kubeflow's
    operator."""
    run_dir = tmp_path / "run"
    arguments = configure_one(model, tmp_path / "run")
    port = free_port()
    logs = [tmp_path / f"node_{number}.txt" for number in (0, 1)]
    ours = dict(NODE_RANK=0, HEAD="127.0.0.1", PORT=port)
    operators = dict(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    first, second = (
        start("static.sh", log, arguments, NODES=2, PROCESSES=1, **variables)
        for log, variables in zip(logs, (ours, operators), strict=True)
    )
    wait_in_run(lambda: lines(run_dir / "metrics.jsonl") >= 1, first, logs[0])
    second.send_signal(signal.SIGTERM)
    assert [first.wait(LIMIT), second.wait(LIMIT)] == [75, 75], logs[0].read_text()
    done = lines(run_dir / "metrics.jsonl")
    assert 1 <= done < 60 and f"stopped by SIGUSR1 after step {done}" in logs[0].read_text()
    assert (run_dir / "checkpoints" / f"step_{done:06d}").is_dir()


@pytest.mark.slow
def test_an_interrupt_ends_the_run_at_once(model, start, tmp_path):
    log = tmp_path / "log.txt"
    running = start("static.sh", log, configure_one(model, tmp_path / "run"), PROCESSES=1)
    wait_in_run(lambda: lines(tmp_path / "run" / "metrics.jsonl") >= 1, running, log)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) not in (0, 75)
    assert "stopped by SIGTERM" in log.read_text()
    assert not list(tmp_path.glob("run/checkpoints/step_*"))


def test_a_misspelt_key_ends_before_torchrun(start, tmp_path):
    log = tmp_path / "log.txt"
    config = tmp_path / "run.yaml"
    config.write_text("run_dir: x\ntrainng: {}\n")
    assert start("static.sh", log, [str(config)], PROCESSES=1).wait(30) == 2
    assert log.read_text().startswith("config error: trainng") and log.read_text().count("\n") == 1
