"""Programs per second in the sandbox of the verifier `code` against a bare interpreter on the same cores.

    OMP_NUM_THREADS=1 python benchmarks/sandbox.py

Ours: an empty program on one test case, with each full isolation of this machine, from source text to verdict.
Peer: `python -I -S -c pass`, the same interpreter. Both run on as many threads as there are cores. Then the same with
one worker in place of one for each core.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import Row, by_turns, hardware, rate_row, run_from_command_line, versions
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.case_formats import read_tests
from megatron_gspo.rewards.sandbox.code_verifier import run_tests
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.isolation import (
    MECHANISMS,
    Interpreter,
    Isolation,
    find_interpreter,
    find_isolation,
)
from megatron_gspo.rewards.sandbox.sandboxes import LocalSandbox

TARGET, CONFIG = 0.5, CodeConfig()
TESTS = read_tests({"tests": [{"input": "", "output": ""}]})
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of this process, what it waited for, and those processes with what they waited for."""
    found = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found += sum(map(int, fields[11:15])) / TICKS
    return found


def turn(jobs: Sequence[Callable[[], None]], count: int, pids: Sequence[int] = ()) -> dict[str, float]:
    """``count`` calls of each job, the jobs in threads."""
    before, start = cpu_seconds(pids), time.perf_counter()
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(lambda job: [job() for _ in range(count)], jobs))
    seconds = time.perf_counter() - start
    return {"amount": count * len(jobs), "seconds": seconds, "cpu_seconds": cpu_seconds(pids) - before}


def ours_of(isolation: Isolation, interpreter: Interpreter, cores: int) -> list[LocalSandbox]:
    """A sandbox for each core, ready."""
    found = [LocalSandbox(CONFIG, interpreter, isolation) for _ in range(cores)]
    for sandbox in found:
        one_test(sandbox)
    return found


def one_test(sandbox: LocalSandbox) -> None:
    """From source text to verdict."""
    assert run_tests(sandbox, "pass", TESTS, CONFIG) == ["passed"]


def measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Two rows for each isolation that works here: against the bare interpreter, and against one worker."""
    interpreter, cores = find_interpreter(), len(os.sched_getaffinity(0))
    command = [interpreter.executable, "-I", "-S", "-c", "pass"]

    def bare() -> None:
        subprocess.run(command, env={}, stdin=subprocess.DEVNULL, check=True)

    measures = {"bare": lambda: turn([bare] * cores, args.count)}
    sandboxes: dict[str, list[LocalSandbox]] = {}
    for mechanism in MECHANISMS:
        try:
            isolation = find_isolation(interpreter, (mechanism,))
        except SandboxError:
            continue
        if not isolation.missing:
            name = isolation.describe().partition(" isolates")[0]
            sandboxes[name] = ours_of(isolation, interpreter, cores)
    for name, own in sandboxes.items():
        jobs = [partial(one_test, sandbox) for sandbox in own]
        pids = [pid for sandbox in own for pid in sandbox._launcher.process_ids]
        measures[name] = partial(turn, jobs, args.count, pids)
        measures[_one(name)] = partial(turn, jobs[:1], args.count, pids[:1])
    taken = by_turns(measures, repeats=args.repeats, seconds=args.seconds)
    for sandbox in itertools.chain.from_iterable(sandboxes.values()):
        sandbox.close()
    against: list[tuple[str, str, str, float | None]]
    against = [(name, "bare", "bare python -I -S -c pass", TARGET) for name in sandboxes]
    against += [(name, _one(name), "1 worker", None) for name in sandboxes]
    rows = [
        rate_row("sandbox", f"programs on one test, {name}", taken[name], taken[other], unit="programs/s",
                 peer_name=peer, target=target, note=f"{cores} cores, a worker on each, full isolation")
        for name, other, peer, target in against
    ]  # fmt: skip
    return rows, {"day": datetime.date.today().isoformat(), "hardware": hardware(), "versions": versions()}


def _one(name: str) -> str:
    return f"{name}, 1 worker"


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 10, "count": 50}, seconds=300)


if __name__ == "__main__":
    main()
