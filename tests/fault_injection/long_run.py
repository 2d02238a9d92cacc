"""Run the demo's model for thousands of short steps with a fault now and then, and measure how
memory, descriptors and files grow.

    python -m tests.fault_injection.long_run FOLDER [--steps 2000] [key=value ...]

Needs `make demo`. FOLDER becomes full: make it a small file system, `mount -t tmpfs -o size=160m
tmpfs FOLDER`. The run has an agent's function, TensorBoard, and a checkpoint every 25 steps. Its
tracker and its function's server are killed, its disk is filled, and it is killed itself; it is
started again each time that it ends. A copy of it goes on undisturbed from a checkpoint before the
last kill. Exits with 1 unless both end bitwise equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import yaml

from tests.fault_injection.bitwise_diff import first_difference

_AGENT = Path(__file__).parents[1] / "support" / "one_answer_agent.py"
_SAVED_EVERY = 25
# The share of the steps after which something happens.
_FAULTS = {0.06: "tracker", 0.1: "function server", 0.15: "disk", 0.93: "run"}
_COPIED = 0.9
_MOST_LIVES = 9
# What a process is known by in its command.
_ROLES = {
    "tracker": "tracking.tracker_process",
    "function server": "agents.function_server",
    "agent process": "agents.hosted_process",
    "run": "megatron_gspo.train",
}


class Sample(NamedTuple):
    """What a process, or the run directory (of = "files", pid = 0), takes after a step."""

    of: str
    pid: int
    step: int
    kib: float
    count: int
    """Descriptors, or files."""


def config_of(folder: Path, steps: int) -> dict[str, object]:
    return {
        "run_dir": str(folder / "run"),
        "model": {"path": "runs/demo/cold_start/hf", "dtype": "float32"},
        "data": {
            "task": {
                "name": "spell_backward",
                "kwargs": {"min_word_len": 3, "max_word_len": 3},
                "size": 200,
                "eval_size": 2,
            },
            "max_prompt_length": 16,
        },
        "agents": {"function": f"{_AGENT}:one_answer", "max_calls": 1, "max_context": 32},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "max_response_length": 4},
        "training": {"steps": steps, "global_batch_size": 2, "max_tokens_per_micro_batch": 128},
        "optimizer": {"lr": 1e-5},
        "evaluation": {"eval_interval": 100, "at_start": False},
        "checkpoint": {"save_interval": _SAVED_EVERY, "keep": 2},
        "tracking": {"plot": False, "tensorboard": True, "ratio_interval": 50},
    }


def start(config: Path, overrides: list[str], log: Path) -> psutil.Popen:
    with log.open("a") as output:
        command = [sys.executable, "-m", "megatron_gspo.train", str(config), *overrides]
        return psutil.Popen(command, stdout=output, stderr=output)


def processes(run: psutil.Popen) -> Iterator[tuple[str, psutil.Process]]:
    """(role, process) of the run and all that it has started, parents first."""
    with contextlib.suppress(psutil.Error):
        for process in [run, *run.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                yield next((r for r, part in _ROLES.items() if part in command), "other"), process


def reached(run_dir: Path) -> int:
    """The run's last step."""
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - 65536, 0))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    return 0


def samples(run: psutil.Popen, run_dir: Path) -> Iterator[Sample]:
    step = reached(run_dir)
    for role, process in processes(run):
        with contextlib.suppress(psutil.Error):
            kib = process.memory_info().rss / 1024
            yield Sample(role, process.pid, step, kib, process.num_fds())
    sizes = []
    for path in run_dir.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    yield Sample("files", 0, step, sum(sizes) / 1024, len(sizes))


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
    """Growth a step of each process that lived for 200 steps, without its first 100."""
    by_process = defaultdict(list)
    for sample in taken:
        by_process[sample.of, sample.pid].append(sample)
    for (of, _), of_process in by_process.items():
        settled = [sample for sample in of_process if sample.step >= of_process[0].step + 100]
        if not settled or settled[-1].step < settled[0].step + 100:
            continue
        steps, kib, counts = np.array([sample[2:] for sample in settled], dtype=float).T
        slopes = [np.polyfit(steps, values, 1)[0] for values in (kib, counts)]
        extent = f"steps {steps[0]:.0f} to {steps[-1]:.0f}"
        growth = f"{kib[0]:.0f} to {kib[-1]:.0f} KiB ({slopes[0]:+.2f} a step)"
        print(f"{of}, {extent}: {growth}, {counts[0]:.0f} to {counts[-1]:.0f} ({slopes[1]:+.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--log", type=Path, default=Path("runs/long_run"), help="for other files")
    options = parser.parse_intermixed_args()
    folder = options.folder.resolve()
    run_dir, copy = folder / "run", folder / "undisturbed"
    options.log.mkdir(parents=True)
    config = options.log / "run.yaml"
    config.write_text(yaml.safe_dump(config_of(folder, options.steps)))
    faults = [(round(share * options.steps), fault) for share, fault in _FAULTS.items()]
    copied = round(_COPIED * options.steps / _SAVED_EVERY) * _SAVED_EVERY
    saved = run_dir / "checkpoints" / f"step_{copied:06d}" / "state.json"
    taken: list[Sample] = []
    for _ in range(_MOST_LIVES):
        run = start(config, options.overrides, options.log / "run.log")
        while run.poll() is None:
            time.sleep(2.0)
            taken += samples(run, run_dir)
            if saved.exists() and not copy.exists():
                unfinished = shutil.ignore_patterns(".*", "tensorboard")
                shutil.copytree(run_dir, copy, ignore=unfinished)
            if faults and taken[-1].step >= faults[0][0]:
                _, fault = faults.pop(0)
                print(f"step {taken[-1].step}: {fault}", flush=True)
                inflict(fault, run, folder)
        print(f"exit code {run.returncode} after step {reached(run_dir)}", flush=True)
        (folder / "filler").unlink(missing_ok=True)
        (options.log / "samples.json").write_text(json.dumps(taken))
        if run.returncode == 0:
            break
    report(taken)
    undisturbed = [*options.overrides, f"run_dir={copy}"]
    start(config, undisturbed, options.log / "undisturbed.log").wait()
    difference = first_difference(run_dir, copy)
    print(difference or "bitwise equal")
    raise SystemExit(bool(difference))


if __name__ == "__main__":
    main()
