"""Servers that die, hang and are restarted while `torchrun -m megatron_gspo.train` trains on them.

A fault is triggered by a line of a server's log (one for each decoded batch) or by a request that passes a proxy, not
by elapsed time. In every case `rollouts.jsonl` lists every sample.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_gspo.servers.server_processes import LocalServers
from tests.sglang.conftest import StartServers
from tests.sglang.test_servers import processes_of
from tests.sglang.test_training import check_ledger
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.training_runs import base_config, records, tiny_model

LOG_EVERY_BATCH = ("--decode-log-interval", "1")
DECODES = re.compile(rb"Decode batch.*#running-req: (\d+)")
MIN_DECODING = 4  # running requests of a server in the middle of a step: responses end at different times
QUICK = {"health_interval": 0.5, "health_timeout": 4.0, "request_timeout": 60.0, "weight_transport": "tensor"}
# a random model samples its end token about once in a hundred tokens
LONG = {"max_response_length": 400}
SECONDS = 300.0  # limit of each wait, which usually takes a twentieth of it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("faulty") / "model")


@pytest.fixture(scope="module")
def servers(start_servers: StartServers, model: str) -> LocalServers:
    return start_servers(count=2, model=model, server_args=LOG_EVERY_BATCH)


class TrainingRun:
    """A `torchrun` process, with its output in `log`."""

    def __init__(self, model: str, run_dir: Path, *, steps: int, rollout: dict[str, Any], sglang: dict[str, Any],
                 processes: int = 1) -> None:
        self.run_dir, self.gate = run_dir, run_dir.with_suffix(".gate")
        self.log = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.log")
        config = base_config(
            model, run_dir, rollout={"engine": "sglang", **LONG, **rollout}, sglang={**QUICK, **sglang},
            data={"verifier": f"{Path(__file__).parent}/patient_verifier.py:score"},
            training={"steps": steps, "max_tokens_per_micro_batch": 900}, checkpoint={"save_interval": 2},
            evaluation={"at_start": False, "at_end": False},
        )  # fmt: skip
        file = run_dir.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                   "-m", "megatron_gspo.train", str(file)]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GATE": str(self.gate)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        metrics = self.run_dir / "metrics.jsonl"
        return sum('"step": 0,' not in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`. The run must not end before."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            assert self.process.poll() is None, f"the run has ended: {self.output[-3000:]}"
            assert time.monotonic() < deadline, f"timeout: {self.output[-3000:]}"
            time.sleep(0.02)
        return value

    def end(self, code: int = 0) -> str:
        """All output, after the run has ended with this exit code."""
        self.process.wait(SECONDS)
        output = self.output
        assert self.process.returncode == code, output[-3000:]
        return output

    def kill(self) -> None:
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
            self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def own_server(model: str, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future]:
    """`kill_and_stop_own_server` runs beside the other tests, because it mostly waits for a server to start."""
    folder = tmp_path_factory.mktemp("own")
    sglang = {"num_servers": 1, "python": sglang_python, "server_args": list(LOG_EVERY_BATCH)}
    run = TrainingRun(model, folder / "run", steps=4, rollout={}, sglang=sglang)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(kill_and_stop_own_server, run)
        run.kill()


@pytest.fixture
def train(model: str, tmp_path: Path) -> Iterator[Callable[..., TrainingRun]]:
    """`train(steps=..., rollout=..., sglang=...)` starts or resumes a run in the test's directory."""
    begun: list[TrainingRun] = []

    def begin(**given: Any) -> TrainingRun:
        begun.append(TrainingRun(model, tmp_path / "run", **given))
        return begun[-1]

    yield begin
    for run in begun:
        run.kill()


def decoding(log: Path) -> Callable[[], bool]:
    """Whether the server with this log has decoded a batch of `MIN_DECODING` requests after this call."""
    size = log.stat().st_size if log.exists() else 0

    def is_decoding() -> bool:
        with open(log, "rb") as file:
            file.seek(size)
            return any(int(count) >= MIN_DECODING for count in DECODES.findall(file.read()))

    return is_decoding


def main_process(url: str) -> psutil.Process:
    """The process of the server at a URL, child of its supervisor."""
    return next(p for p in processes_of(url) if p.cmdline()[1:3] == ["-m", "sglang.launch_server"])


def kill(url: str) -> None:
    main_process(url).kill()


def decoding_process(run: TrainingRun, url: str, log: Path) -> psutil.Process:
    """The process of the server at a URL, returned when it begins to decode; looked up before, so without a delay."""
    process = main_process(url)
    run.wait_for(decoding(log))
    return process


def total(found: list[dict[str, Any]], name: str) -> float:
    return sum(record.get(f"rollout/{name}", 0.0) for record in found)


def check_run(run: TrainingRun, steps: int, staleness: int = 0) -> list[dict[str, Any]]:
    found = [record for record in records(run.run_dir) if record["step"] > 0]
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    assert max(record["staleness/max"] for record in found) <= staleness
    check_ledger(run.run_dir, batch=4, n=4, staleness=staleness)
    return found


def test_servers_fail_in_every_way_are_killed_and_restart_with_old_weights(train, servers):
    """One is killed in a generation, one in an update; the test restarts them. The run is one step ahead and continues
    with the remaining server."""
    servers.poll()
    with ExitStack() as stack:
        first, second = (stack.enter_context(FaultProxy(url)) for url in servers.urls)
        for kind in ("error", "half", "wrong_lengths", "late", "old_version"):
            first.add(Fault(kind, seconds=2.0))
        second.add(Fault("call", path="/update_weights_from_tensor", skip=3, action=lambda: kill(servers.urls[1])))
        run = train(steps=8, rollout={"max_staleness": 1, "overlap": True, "oversampling": 2.0},
                    sglang={"urls": [first.url, second.url]})  # fmt: skip
        run.wait_for(lambda: "another-life" in run.output)  # a kill before would end that request too
        first.add(Fault("call", skip=4, action=lambda: kill(servers.urls[0]), seconds=0.1))
        run.wait_for(lambda: not first.pending and not second.pending)
        run.gate.touch()
        try:
            restarted: set[str] = set()
            run.wait_for(lambda: restarted.update(servers.poll().restarted) or len(restarted) == 2)
            for proxy in (first, second):  # a second /model_info request follows the reply to the first
                seen = len(proxy.requests)
                run.wait_for(lambda proxy=proxy, seen=seen: proxy.requests[seen:].count("/model_info") >= 2)
        finally:
            run.gate.unlink()
        run.end()
    found = check_run(run, 8, staleness=1)
    assert total(found, "refused") == 1 and total(found, "stale_responses") >= 1
    assert total(found, "retries") >= 5, "an error, half a reply, two refused ones and what was in flight at the kill"
    assert min(record["rollout/servers"] for record in found) <= 1 and found[-1]["rollout/servers"] == 2
    ledger = [json.loads(line) for line in (run.run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(ledger) == 8


def test_without_servers_the_run_ends_with_a_checkpoint_and_resumes_from_it(train, servers):
    servers.poll()
    settings = dict(steps=6, rollout={}, sglang={"urls": servers.urls, "recovery_timeout": 3.0})
    run = train(**settings, processes=2)
    run.wait_for(lambda: run.steps >= 3)
    processes = [main_process(url) for url in servers.urls]
    watches = [decoding(log) for log in servers.logs]
    run.wait_for(lambda: any(watch() for watch in watches))
    servers.pause()
    for process in processes:
        process.kill()
    began = time.monotonic()
    output = run.end(code=1)
    assert time.monotonic() - began >= 3.0, "it waits for recovery_timeout"
    checkpoint = run.run_dir / "checkpoints" / f"step_{run.steps:06d}"
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: rank \d: (on the first rank: NoServerError: )?no server has answered for 3 s: ", line)
    assert all(url in line for url in servers.urls)
    assert str(checkpoint) in line and "start again" in line and checkpoint.is_dir()
    assert "Traceback" not in output.split("error: ")[0]
    servers.resume()
    restarted: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while len(restarted) < 2:
        restarted.update(servers.poll().restarted)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = train(**settings)
    assert f"resumed from {checkpoint}: step" in again.end()
    check_run(again, 6)


def kill_and_stop_own_server(run: TrainingRun) -> TrainingRun:
    """Kill the one server of a run in the middle of a generation, and stop it in the middle of another."""
    log = run.run_dir / "servers" / "server_0.log"
    url = run.wait_for(lambda: [line for line in run.output.splitlines() if " answer after " in line])[0].split()[1]
    run.wait_for(lambda: run.steps >= 1)
    decoding_process(run, url, log).kill()
    run.wait_for(lambda: "answers again" in run.output)
    steps = run.steps
    run.wait_for(lambda: run.steps > steps)
    stopped = decoding_process(run, url, log)
    os.killpg(os.getpgid(stopped.pid), signal.SIGSTOP)
    output = run.end()
    assert f"{url}: does not answer" in output and output.count("answers again") >= 2 and "restarting it" in output
    assert not stopped.is_running() and not processes_of(url), "no process is left"
    return run


def test_a_server_of_the_run_is_killed_and_another_time_hangs(own_server):
    """It is the only server: the run waits for its restart, sends it the weights and continues."""
    found = check_run(run := own_server.result(3 * SECONDS), 4)
    assert len((run.run_dir / "rollouts.jsonl").read_text().splitlines()) == 4
    assert total(found, "retries") >= 2, "requests were in flight both times"
    assert total(found, "requests") == 4 * 16 + total(found, "continued"), "each sample is counted once"
