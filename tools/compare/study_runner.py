"""Run the runs of a comparison, several at a time, and skip those that are finished.

A run is `torchrun -m megatron_gspo.train` in its own process group. Its output goes to
run_dir/log.txt. If it fails, run_dir/failure.json has the reason, so that a failure is a result
like any other. Processes are managed here, not by concurrent.futures: an interrupt must end each
run with all of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.load import flat, read_file
from megatron_gspo.errors import InputError, RunError
from megatron_gspo.tools.compare.run_records import FAILURE, figures, read_run
from megatron_gspo.tools.compare.study_plan import Comparison, RunSpec, as_arguments, resolve
from megatron_gspo.tracking.progress import format_time, held_out_text
from megatron_gspo.tracking.run_directory import write_atomically

_POLL = 0.2  # seconds between two checks of the processes
_STOPPED = (130, 143, -2, -15, -9)  # ended from outside: no result, the run resumes next time
_PATIENCE = 15.0  # seconds that a run has to leave after SIGTERM


class StaleRun(InputError):
    """A run directory that belongs to other settings than the comparison file has now."""

    label = "comparison error"


class Interrupted(RunError):
    """The comparison was interrupted; finished runs are kept, the others resume at the next
    start.
    """

    exit_code = 130


@dataclass
class _Job:
    spec: RunSpec
    process: subprocess.Popen[bytes]
    started: float


def torchrun(processes: int, config: Path, arguments: Sequence[str]) -> list[str]:
    """The command of one run on this machine."""
    head = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return [*head, "-m", "megatron_gspo.train", str(config), *arguments]


def child_environment() -> dict[str, str]:
    """One thread a process: two processes that each take all cores are many times slower than
    one after the other.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def is_over(comparison: Comparison, spec: RunSpec, *, retry: bool = False) -> bool:
    """Whether a run is finished, or failed and not to be tried again.

    Raises StaleRun where the directory's resolved config isn't the one that the run would have now.
    """
    run = read_run(spec.run_dir, variant=spec.variant, seed=spec.seed)
    if (spec.run_dir / "config.yaml").is_file():
        _check_same(comparison, spec)
    return run.is_over and not (retry and run.status == "failed")


def command_of(comparison: Comparison, spec: RunSpec) -> list[str]:
    """What starts a run."""
    return torchrun(
        comparison.config.processes, comparison.base_file, as_arguments(comparison, spec)
    )


def execute(
    comparison: Comparison,
    specs: Sequence[RunSpec],
    *,
    slots: int,
    retry: bool = False,
    command: Callable[[Comparison, RunSpec], list[str]] = command_of,
) -> None:
    """Bring every run to its end, `slots` at once, in the given order.

    A run that fails is recorded and doesn't stop the others. Raises StaleRun before anything
    starts, Interrupted after Ctrl-C or SIGTERM, with every process ended.
    """
    waiting = [spec for spec in specs if not is_over(comparison, spec, retry=retry)]
    done = len(specs) - len(waiting)
    active: list[_Job] = []
    with stop_signals() as received:
        try:
            while (waiting or active) and not received:
                while waiting and len(active) < slots:
                    spec = waiting.pop(0)
                    active.append(_start(spec, command(comparison, spec)))
                time.sleep(_POLL)
                for job in [job for job in active if job.process.poll() is not None]:
                    active.remove(job)
                    done += 1
                    _settle(job)
                    print(f"{done}/{len(specs)}  {_result(job)}", file=sys.stderr, flush=True)
        finally:
            _end([job.process for job in active])


def run_one(command: Sequence[str]) -> int:
    """Run a command in the foreground; its exit code. A stop ends all its processes and raises
    Interrupted.
    """
    with stop_signals() as received:
        process = subprocess.Popen(command, env=child_environment(), start_new_session=True)
        try:
            while process.poll() is None and not received:
                time.sleep(_POLL)
        finally:
            _end([process])
    return process.returncode


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals among Ctrl-C and SIGTERM that arrive in the block; after one, Interrupted is
    raised at its end. Raised within Popen, it would leave a process without an owner.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted("interrupted; run the same command again to continue")


def _start(spec: RunSpec, command: Sequence[str]) -> _Job:
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    (spec.run_dir / FAILURE).unlink(missing_ok=True)
    with (spec.run_dir / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its ranks end with it, and Ctrl-C reaches only this process
        )
    return _Job(spec, process, time.monotonic())


def _settle(job: _Job) -> None:
    """Record an end with an error; one from outside leaves no record."""
    code = job.process.returncode
    if code in _STOPPED:
        return
    if code or not (job.spec.run_dir / "summary.json").is_file():
        failure = {"exit_code": code, "message": last_words(job.spec.run_dir / "log.txt")}
        write_atomically(job.spec.run_dir / FAILURE, json.dumps(failure, indent=2) + "\n")


def _result(job: _Job) -> str:
    """Such as `gspo seed 1: finished, accuracy 61.2%, 1:05`."""
    run = read_run(job.spec.run_dir, variant=job.spec.variant, seed=job.spec.seed)
    numbers = figures(run)
    words = [f"{job.spec.name}: {run.status}"]
    if run.message:
        words.append(run.message)
    if numbers.collapsed:
        words.append("collapsed")
    if numbers.final_accuracy is not None:
        words.append(held_out_text(numbers.final_accuracy))
    words.append(format_time(time.monotonic() - job.started))
    return ", ".join(words)


def last_words(log: Path) -> str:
    """The run's line with the reason of its end, else the log's last line that torchrun didn't
    write.
    """
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    for line in reversed(lines):
        head, colon, rest = line.partition(": ")
        if colon and (head == "error" or head.endswith(" error")):
            return rest
    of_the_run = [line for line in lines if not _of_torchrun(line)]
    return of_the_run[-1] if of_the_run else "log.txt is empty"


def _of_torchrun(line: str) -> bool:
    return "torch.distributed" in line or line.startswith(("=", "-", "E1", "W1"))


def _check_same(comparison: Comparison, spec: RunSpec) -> None:
    """Raise StaleRun for a run of other settings, but for those that change no result."""
    wanted = flat(resolve(comparison, spec).dump())
    try:
        data = read_file(spec.run_dir / "config.yaml")
        data.pop("environment", None)
        recorded = flat(Config.from_dict(data).dump())
    except ConfigError as error:
        raise StaleRun(
            f"{spec.run_dir}: its config.yaml is not valid here ({error}); remove the directory"
        ) from None
    for key in {**wanted, **recorded}:
        here = wanted.get(key)
        there = recorded.get(key)
        if here != there and not key.startswith("tracking."):
            raise StaleRun(
                f"{spec.run_dir}: was run with {key} = {there}, the comparison now has {here}; "
                "choose another folder or remove the directory"
            )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run, each with its whole group."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in running:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
