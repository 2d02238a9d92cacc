"""Run the demo's model for thousands of short steps with faults, and measure what grows.

    python -m tests.fault_injection.long_run FOLDER [--steps 2000] [key=value ...]

Needs `make demo`. FOLDER becomes full: make it a small file system, `mount -t tmpfs -o size=160m
tmpfs FOLDER`. The run's tracker and its function's server are killed, its disk is filled, and it is
killed itself; it is started again each time that it ends. A copy goes on undisturbed from a
checkpoint before the last kill. Exits with 1 unless both end bitwise equal.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from tests.fault_injection.bitwise_diff import first_difference

_AGENT = Path(__file__).parents[1] / "support" / "one_answer_agent.py"
_EXAMPLE = "examples/agents/spell_backward.yaml"
_SAVED_EVERY = 25
_SHORT_STEPS = [
    "parallel.expert_model_parallel_size=1",
    f"agents.function={_AGENT}:one_answer",
    "agents.max_context=32",
    "data.task.kwargs={min_word_len: 3, max_word_len: 3}",
    "rollout={rollout_batch_size: 1, n_samples_per_prompt: 2, max_response_length: 4, max_batch_size: 1}",
    "training.global_batch_size=2",
    "optimizer.lr=1e-5",
    "evaluation.eval_interval=0",
    f"checkpoint.save_interval={_SAVED_EVERY}",
    "tracking={plot: false, tensorboard: true}",
]
# The share of the steps after which something happens.
_FAULTS = {0.06: "tracker", 0.1: "function server", 0.15: "disk", 0.93: "run"}
_COPIED = 0.9
_UNFINISHED = shutil.ignore_patterns(".lock", ".partial_*", ".removed_*")
_MOST_LIVES = 9
# What a process is known by in its command.
_ROLES = {
    "tracker": "tracking.tracker_process",
    "function server": "agents.function_server",
    "agent process": "agents.hosted_process",
    "run": "megatron_gspo.train",
}


# After a step: whose (a role, or "files"), its process, KiB, and descriptors or files.
Sample = tuple[int, str, int, float, int]


def start(run_dir: Path, overrides: list[str], log: Path) -> psutil.Popen:
    with log.open("a") as output:
        command = [sys.executable, "-m", "megatron_gspo.train", _EXAMPLE, f"run_dir={run_dir}"]
        return psutil.Popen([*command, *_SHORT_STEPS, *overrides], stdout=output, stderr=output)


def processes(run: psutil.Popen) -> Iterator[tuple[str, psutil.Process]]:
    """(role, process) of the run and of what it has started, parents first."""
    with contextlib.suppress(psutil.Error):
        for process in [run, *run.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, StopIteration):
                command = " ".join(process.cmdline())
                role = next(role for role, part in _ROLES.items() if part in command)
                yield role, process


def samples(run: psutil.Popen, run_dir: Path) -> Iterator[Sample]:
    metrics = run_dir / "metrics.jsonl"
    step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    for role, process in processes(run):
        with contextlib.suppress(psutil.Error):
            yield step, role, process.pid, process.memory_info().rss / 1024, process.num_fds()
    sizes = []
    for path in run_dir.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    yield step, "files", 0, sum(sizes) / 1024, len(sizes)


def inflict(fault: str, run: psutil.Popen, folder: Path) -> None:
    if fault != "disk":
        next(process for role, process in processes(run) if role == fault).kill()
        return
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def report(taken: list[Sample]) -> None:
    """Print the growth a step of each process that lived for 200 steps, without its first 100."""
    by_process = defaultdict(list)
    for step, role, pid, kib, count in taken:
        by_process[role, pid].append((step, kib, count))
    for (role, _), values in by_process.items():
        settled = [value for value in values if value[0] >= values[0][0] + 100]
        if settled and settled[-1][0] >= settled[0][0] + 100:
            steps, kib, counts = np.array(settled).T
            slope = np.polyfit(steps, kib, 1)[0]
            print(f"{role}, steps {steps[0]:.0f} to {steps[-1]:.0f}: {slope:+.2f} KiB a step,")
            print(f"  {kib[0]:.0f} to {kib[-1]:.0f} KiB, {counts[0]:.0f} to {counts[-1]:.0f} files")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_intermixed_args()
    folder = options.folder.resolve()
    run_dir, copy, log = folder / "run", folder / "undisturbed", Path("runs/long_run")
    log.mkdir(parents=True, exist_ok=True)
    overrides = [f"training.steps={options.steps}", *options.overrides]
    faults = [(share * options.steps, fault) for share, fault in _FAULTS.items()]
    copied = round(_COPIED * options.steps / _SAVED_EVERY) * _SAVED_EVERY
    saved = run_dir / "checkpoints" / f"step_{copied:06d}" / "state.json"
    taken: list[Sample] = []
    for _ in range(_MOST_LIVES):
        run = start(run_dir, overrides, log / "run.log")
        while run.poll() is None:
            time.sleep(2.0)
            taken += samples(run, run_dir)
            if saved.exists() and not copy.exists():
                shutil.copytree(run_dir, copy, ignore=_UNFINISHED)
            if faults and taken[-1][0] >= faults[0][0]:
                print(f"step {taken[-1][0]}: {faults[0][1]}", flush=True)
                inflict(faults.pop(0)[1], run, folder)
        print(f"exit code {run.returncode} after step {taken[-1][0]}", flush=True)
        (folder / "filler").unlink(missing_ok=True)
        if run.returncode == 0:
            break
    report(taken)
    start(copy, overrides, log / "undisturbed.log").wait()
    difference = first_difference(run_dir, copy)
    print(difference or "bitwise equal")
    raise SystemExit(bool(difference))


if __name__ == "__main__":
    main()
