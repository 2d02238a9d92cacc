"""Runs of `torchrun -m megatron_gspo.train` whose servers die, hang and are restarted, with every
kind of server.

A fault is triggered by requests that a server works on or that pass a proxy, not by elapsed time.
In every case `rollouts.jsonl` lists every sample.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml

from megatron_gspo.servers.server_processes import LocalServers
from tests.support.fault_proxy import Changes, Fault, FaultProxy
from tests.support.real_servers import main_process, processes_of, signal_server
from tests.support.training_runs import base_config, check_ledger, ledger, records
from tests.support.waiting import wait_for

# Running requests of a server in the middle of a step: responses end at different times.
MIN_DECODING = 4
# a random model samples its end token about once in a hundred tokens
LONG = {"max_response_length": 400}
CLIENTS = 2  # data-parallel ranks, each a client of all servers
SECONDS = 600.0  # limit of each wait, which usually takes a twentieth of it
Watch = Callable[[], bool]


@dataclass(frozen=True)
class FaultyServers:
    """A kind of servers. engine: of `rollout.engine`. model: that they serve. module: that their
    processes run. settings: of the config's section. generate, changes: see `FaultProxy`.
    update_path, version_path: of the one request of an update, and of a question for the version.
    decoding: of a server's URL and log, whether it has decoded `MIN_DECODING` requests at once
    after this call."""

    engine: str
    model: str
    module: str
    settings: Mapping[str, Any]
    generate: str
    changes: Changes
    update_path: str
    version_path: str
    decoding: Callable[[str, Path], Watch]


class TrainingRun:
    """A `torchrun` process, with its output in `log`.

    servers: settings of the config's section, besides the kind's.
    """

    def __init__(
        self,
        kind: FaultyServers,
        run_dir: Path,
        *,
        steps: int,
        servers: Mapping[str, Any],
        rollout: Mapping[str, Any] | None = None,
        processes: int = 1,
    ) -> None:
        self.kind = kind
        self.run_dir = run_dir
        self.gate = run_dir.with_suffix(".gate")
        self.log = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.log")
        sections = {
            "rollout": {"engine": kind.engine, **LONG, **(rollout or {})},
            kind.engine: {**kind.settings, **servers},
        }
        config = base_config(
            kind.model,
            run_dir,
            data={"verifier": f"{Path(__file__).with_name('patient_verifier.py')}:score"},
            training={"steps": steps, "max_tokens_per_micro_batch": 900},
            checkpoint={"save_interval": 2},
            evaluation={"at_start": False, "at_end": False},
            **sections,
        )
        file = run_dir.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(config))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            "-m",
            "megatron_gspo.train",
            str(file),
        ]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "GATE": str(self.gate),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        metrics = self.run_dir / "metrics.jsonl"
        return (
            sum('"step": 0,' not in line for line in metrics.read_text().splitlines())
            if metrics.exists()
            else 0
        )

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`. The run must not end before."""
        return wait_for(
            condition, SECONDS, alive=lambda: self.process.poll() is None, said=lambda: self.output
        )

    def end(self, code: int = 0) -> str:
        """All output, after the run has ended with this exit code."""
        self.process.wait(SECONDS)
        output = self.output
        assert self.process.returncode == code, output[-3000:]
        return output

    def kill(self) -> None:
        """End all of its processes that are left."""
        if self.process.poll() is None:
            for process in [
                *psutil.Process(self.process.pid).children(recursive=True),
                self.process,
            ]:
                process.kill()
            self.process.wait()


Begin = Callable[..., TrainingRun]


@contextmanager
def runs_in(folder: Path, kind: FaultyServers) -> Iterator[Begin]:
    """`begin(steps=..., servers=...)` starts or resumes a run in the folder; what still runs is
    killed at the end.
    """
    begun: list[TrainingRun] = []

    def begin(**given: Any) -> TrainingRun:
        begun.append(TrainingRun(kind, folder / "run", **given))
        return begun[-1]

    try:
        yield begin
    finally:
        for run in begun:
            run.kill()


def decoding_process(run: TrainingRun, url: str, log: Path) -> psutil.Process:
    """The process of the server at a URL, returned when it begins to decode; looked up before,
    so without a delay.
    """
    process = main_process(url, run.kind.module)
    run.wait_for(run.kind.decoding(url, log))
    return process


def total(step_records: Sequence[Mapping[str, Any]], name: str) -> float:
    """The sum of a `rollout/*` metric."""
    return sum(record.get(f"rollout/{name}", 0.0) for record in step_records)


def check_run(run: TrainingRun, steps: int, staleness: int = 0) -> list[dict[str, Any]]:
    """The records of all steps, of which none lacks a sample or has it twice."""
    step_records = [record for record in records(run.run_dir) if record["step"] > 0]
    assert [record["step"] for record in step_records] == list(range(1, steps + 1))
    assert max(record["staleness/max"] for record in step_records) <= staleness
    check_ledger(run.run_dir, batch=4, n=4, staleness=staleness)
    assert len(ledger(run.run_dir)) == steps
    return step_records


def fail_in_every_way(begin: Begin, kind: FaultyServers, servers: LocalServers) -> None:
    """Of two servers one is killed in a generation, one in an update; the caller's `servers`
    restart them with the model's weights. The run is one step ahead and continues with the
    remaining server. Nothing is left of a killed server's processes."""
    servers.poll()
    first_lives = [p for url in servers.urls for p in processes_of(url, kind.module)]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(FaultProxy(url, generate=kind.generate, changes=kind.changes))
            for url in servers.urls
        )
        kill_first, kill_second = (main_process(url, kind.module).kill for url in servers.urls)
        second.add(Fault("call", path=kind.update_path, skip=3, action=kill_second))
        run = begin(
            steps=8,
            rollout={"max_staleness": 1, "overlap": True, "oversampling": 2.0},
            servers={"urls": [first.url, second.url]},
            processes=CLIENTS,
        )
        # Before, some requests are log-prob checks, on the same path.
        run.wait_for(lambda: run.steps >= 1)
        for name in ("error", "half", "wrong_lengths", "late"):
            first.add(Fault(name, seconds=2.0))
        # Until it is seen: the run may drop the answer to one request.
        first.add(Fault("old_version", times=10**6))
        # A kill before would end that request too.
        run.wait_for(lambda: "another-life" in run.output)
        first.clear()
        first.add(Fault("call", skip=4, action=kill_first, seconds=0.1))
        run.wait_for(lambda: not first.pending and not second.pending)
        run.gate.touch()
        try:
            restarted: set[str] = set()
            run.wait_for(lambda: restarted.update(servers.poll().restarted) or len(restarted) == 2)
            # A second question of a client follows the reply to its first.
            for proxy in (first, second):
                seen = len(proxy.requests)
                run.wait_for(
                    lambda proxy=proxy, seen=seen: (
                        proxy.requests[seen:].count(kind.version_path) > CLIENTS
                    )
                )
        finally:
            run.gate.unlink()
        run.end()
    assert not [process.pid for process in first_lives if process.is_running()]
    step_records = check_run(run, 8, staleness=1)
    assert total(step_records, "refused") == 1 and total(step_records, "stale_responses") >= 1
    assert total(step_records, "retries") >= 5, (
        "an error, half a reply, two refused ones and what was in flight at the kill"
    )
    # Whether a step ended with one server depends on how soon the other was back.
    assert step_records[-1]["rollout/servers"] == 2


def end_without_servers_and_resume(
    begin: Begin, kind: FaultyServers, servers: LocalServers
) -> None:
    """All servers are killed at once.

    The run ends with a checkpoint, and resumes from it when they are back.
    """
    servers.poll()
    settings = dict(steps=6, servers={"urls": servers.urls, "recovery_timeout": 3.0})
    run = begin(**settings, processes=CLIENTS)
    run.wait_for(lambda: run.steps >= 3)
    processes = [main_process(url, kind.module) for url in servers.urls]
    watches = [kind.decoding(url, log) for url, log in zip(servers.urls, servers.logs, strict=True)]
    run.wait_for(lambda: any(watch() for watch in watches))
    # Nothing notices that they are dead, or restarts them, until the run has ended.
    with mock.patch.object(servers, "_check"):
        for process in processes:
            process.kill()
        began = time.monotonic()
        output = run.end(code=1)
    assert time.monotonic() - began >= 3.0, "it waits for recovery_timeout"
    checkpoint = run.run_dir / "checkpoints" / f"step_{run.steps:06d}"
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: rank \d: (on the first rank: NoServerError: )?no server has answered for 3 s: ",
        line,
    )
    assert all(url in line for url in servers.urls)
    assert str(checkpoint) in line and "start again" in line and checkpoint.is_dir()
    assert "Traceback" not in output.split("error: ")[0]
    restarted: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while len(restarted) < 2:
        restarted.update(servers.poll().restarted)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = begin(**settings)
    assert f"resumed from {checkpoint}: step" in again.end()
    check_run(again, 6)


def kill_and_stop_own_server(run: TrainingRun) -> None:
    """The one server of a run of 4 steps is killed in the middle of a generation, and stopped in
    the middle of another. The run waits for its restart, sends it the weights and continues."""
    log = run.run_dir / "servers" / "server_0.log"
    url = run.wait_for(
        lambda: [line for line in run.output.splitlines() if " answer after " in line]
    )[0].split()[1]
    run.wait_for(lambda: run.steps >= 1)
    decoding_process(run, url, log).kill()
    run.wait_for(lambda: "answers again" in run.output)
    steps = run.steps
    run.wait_for(lambda: run.steps > steps)
    stopped = decoding_process(run, url, log)
    signal_server(url, run.kind.module, signal.SIGSTOP)
    output = run.end()
    returns = [
        line for line in output.splitlines() if "answers again" in line and " sees it: " not in line
    ]
    assert f"{url}: does not answer" in output and len(returns) >= 2 and "restarting it" in output
    assert not stopped.is_running() and not processes_of(url, run.kind.module), "no process is left"
    step_records = check_run(run, 4)
    assert total(step_records, "retries") >= 2, "requests were in flight both times"
    assert total(step_records, "requests") == 4 * 16 + total(step_records, "continued"), (
        "each sample is counted once"
    )
