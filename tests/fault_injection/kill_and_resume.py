"""Kill training runs with SIGKILL, start them again, and count how many end bitwise equal to an
undisturbed one.

    python -m tests.fault_injection.kill_and_resume [--trials 30] [--seed 0] [--processes 2]
    [key=value ...]

Each trial is a run of its own that is killed one to three times, one rank or all at once: at a
random moment, before a random file operation (of a save, of its publication, of the removal of an
old checkpoint, of the export, of metrics, samples, summary), or inside generation, verification,
the log-prob pass, an optimizer step, a weight update of the engine, an evaluation or the load of a
checkpoint. Some run under ``torchrun --max-restarts 1``. Compared are the exported weights, every
tensor of the checkpoints, metrics without their times, samples and summary. ``key=value`` changes
the run's config. Exits with 1 unless all are equal.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers.utils.logging import disable_progress_bar

from megatron_gspo.config import load_config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from megatron_gspo.tracking import read_metrics
from tests.fault_injection.bitwise_diff import first_difference
from tests.fault_injection.kill_points import KINDS, Target
from tests.fault_injection.process_harness import (
    Life,
    RandomKill,
    live,
    live_under_torchrun,
    warm_up,
)

WORD = "Reverse:"
_MOST_KILLS = 3
_MOST_LIVES = 9


def score(response: str, prompt: Prompt) -> float:
    """A verifier that gives random responses different rewards, with noise from every global
    generator.
    """
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return (sum(map(ord, response)) % 7) / 6 + 1e-3 * noise


@dataclass
class Trial:
    """One run with its kills, and what became of it.

    fault: "" where its end is bitwise the reference's.
    """

    number: int
    moments: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    fault: str = ""


class Reference:
    """The run that is left alone: what the others must equal, how long it takes and how often
    what happens in it.
    """

    def __init__(self, folder: Path, processes: int, overrides: list[str]) -> None:
        self.folder = folder
        self.processes = processes
        self.overrides = overrides
        model = folder / "model"
        write_tiny_model(
            model, TinyModel(hidden=32, layers=2, experts=4, expert_width=16), words=[WORD]
        )
        draw = random.Random(0)
        words_to_reverse = [
            "".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(48)
        ]
        for name, words in (
            ("prompts", words_to_reverse[:40]),
            ("held_out", words_to_reverse[40:]),
        ):
            lines = [f'{{"prompt": "{WORD}{word}", "answer": "{word[::-1]}"}}' for word in words]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        self.run_dir = folder / "reference"
        self.life = live(
            self.config(self.run_dir), folder / "lives" / "reference", processes, None, grace=0.0
        )
        if not self.life.finished:
            raise SystemExit(f"the run that was left alone failed:\n{self.life.log[-3000:]}")

    def config(self, run_dir: Path, *overrides: str) -> Path:
        """Write the config of a run in ``run_dir``; ``overrides`` come after the reference's
        own.
        """
        parallel = (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
            if self.processes % 2 == 0
            else {}
        )
        content: dict[str, Any] = {
            "seed": 7,
            "run_dir": str(run_dir),
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "data": {
                "prompts": str(self.folder / "prompts.jsonl"),
                "eval_prompts": str(self.folder / "held_out.jsonl"),
                "max_prompt_length": 32,
                "verifier": f"{Path(__file__).resolve()}:score",
                "verifier_timeout": None,
            },
            "parallel": {**parallel, "distributed_timeout_minutes": 2.0},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "max_response_length": 6,
            },
            "training": {"steps": 6, "global_batch_size": 8, "max_tokens_per_micro_batch": 128},
            "optimizer": {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 2},
            "evaluation": {"eval_interval": 3, "n_samples": 2, "pass_at_k": [2]},
            "checkpoint": {"save_interval": 2, "keep": 2},
            "tracking": {"plot": False},
        }
        file = run_dir.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(content))
        loaded = load_config(file, [*self.overrides, *overrides])
        file.write_text(loaded.to_yaml())
        return file


def run_trial(reference: Reference, number: int, seed: int) -> Trial:
    """Kill a run at moments drawn from (seed, number), resume it until it ends, and compare."""
    draw = random.Random(f"{seed}/{number}")
    trial = Trial(number)
    run_dir = reference.folder / f"trial_{number:03d}"
    config = reference.config(run_dir)
    folder = reference.folder / "lives" / run_dir.name
    if number % 10 == 9:
        due = partial(_has_reached, run_dir, draw.randint(0, 3))
        kill = RandomKill(draw.uniform(0.0, 0.3), draw.randrange(reference.processes))
        life = live_under_torchrun(config, folder, reference.processes, kill, after=due)
        _note(trial, life, kill, run_dir, under_torchrun=True)
    else:
        _live_and_die(reference, trial, draw, config, folder)
    trial.fault = trial.fault or first_difference(run_dir, reference.run_dir)
    if not trial.fault:
        shutil.rmtree(run_dir)
    return trial


def _live_and_die(
    reference: Reference, trial: Trial, draw: random.Random, config: Path, folder: Path
) -> None:
    """The lives of one run: one to three that are killed, and one that isn't. A first kill that
    comes too late is repeated, sooner."""
    run_dir = reference.folder / f"trial_{trial.number:03d}"
    kills = draw.choice((1, 1, 2, _MOST_KILLS))
    speed = 1.0  # of this machine now, against when the reference ran
    for number in range(_MOST_LIVES):
        turn = trial.kills.total()
        kill = _kill(reference, trial.number, turn, draw, speed) if turn < kills else None
        grace = draw.choice((0.0, 0.1, 0.5, 2.0))
        life = live(config, folder / str(number), reference.processes, kill, grace=grace)
        _note(trial, life, kill, run_dir, under_torchrun=False)
        if trial.fault or (life.finished and trial.kills):
            return
        if life.finished:
            speed /= 2
            shutil.rmtree(run_dir)
    trial.fault = f"not over after {_MOST_LIVES} lives"


def _kill(
    reference: Reference, number: int, turn: int, draw: random.Random, speed: float
) -> RandomKill | Target:
    """A random moment for every other trial's first kill, else an event of the kind whose turn
    it is.
    """
    everyone = draw.random() < 0.5
    if (number + turn) % 2 == 0:
        rank = None if everyone else draw.randrange(reference.processes)
        return RandomKill(draw.uniform(0.0, speed * reference.life.seconds / (turn + 1)), rank)
    kind = KINDS[(number // 2 + 5 * turn) % len(KINDS)]
    counts = [counts_of_rank[kind] for counts_of_rank in reference.life.counts]
    if not any(counts) or (kind == "load" and turn == 0):  # nothing is loaded in an undisturbed run
        kind = draw.choice(("save", "publication", "weight update"))
        counts = [counts_of_rank[kind] for counts_of_rank in reference.life.counts]
    rank = draw.choice([i for i, count in enumerate(counts) if count])
    return Target(kind, draw.randint(1, max(1, counts[rank] // (turn + 1))), rank, everyone)


def _note(
    trial: Trial, life: Life, kill: RandomKill | Target | None, run_dir: Path, under_torchrun: bool
) -> None:
    """Add what this life was to the trial."""
    resumed_from = re.findall(r"resumed from \S*(step_\d+)", life.log)
    trial.resumed += [name.removeprefix("step_").lstrip("0") for name in resumed_from]
    restarted = under_torchrun and "exitcode: -9" in life.log
    if kill is not None and (life.was_killed or restarted):
        reached = _reached(run_dir)
        what = kill.kind if isinstance(kill, Target) else f"{kill.after:.2f} s"
        moment = f"{what} {kill.count}" if isinstance(kill, Target) else what
        who = (
            "all"
            if (kill.rank is None or getattr(kill, "kills_all", False))
            else f"rank {kill.rank}"
        )
        after = "" if under_torchrun or reached is None else f", step {reached}"
        trial.moments.append(f"{'torchrun: ' if under_torchrun else ''}{moment} ({who}{after})")
        trial.kills["random moment" if isinstance(kill, RandomKill) else kill.kind] += 1
    if life.orphans:
        trial.fault = f"{life.orphans} processes were left behind"
    elif under_torchrun and not restarted:
        trial.fault = "torchrun's run was not killed"
    elif not life.finished and (under_torchrun or kill is None or not life.was_killed):
        trial.fault = (
            "the run failed: " + (life.log.strip().splitlines() or ["no output"])[-1][:200]
        )


def _reached(run_dir: Path) -> int | None:
    """The last step that the run has recorded."""
    records = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
    return records[-1]["step"] if records else None


def _has_reached(run_dir: Path, step: int) -> bool:
    reached = _reached(run_dir)
    return reached is not None and reached >= step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run's config")
    parser.add_argument(
        "--trials", type=int, default=30, help="runs that are killed (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="even: TP 2 and EP 2; 4 are two replicas (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="keep everything there (default: a temporary folder)"
    )
    parser.add_argument("--only", type=int, help="this trial alone")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    disable_progress_bar()  # Transformers' own
    warm_up()
    reference = Reference(folder.resolve(), options.processes, options.overrides)
    console.print(
        f"left alone: {reference.life.seconds:.1f} s on {options.processes} processes; seed"
        f" {options.seed}"
    )
    numbers = range(options.trials) if options.only is None else [options.only]
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    trials = []
    with Progress(*bar, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("trials", total=len(numbers))
        for number in numbers:
            trial = run_trial(reference, number, options.seed)
            trials.append(trial)
            resumed = ", ".join(trial.resumed) or "start"
            moments = "; ".join(trial.moments)
            progress.console.print(
                f"{number:3}  {trial.fault or 'equal'} | from {resumed} | {moments}"
            )
            progress.advance(task)
    _report(console, trials, time.monotonic() - started)
    if options.folder is None and not any(trial.fault for trial in trials):
        shutil.rmtree(folder)
    raise SystemExit(any(trial.fault for trial in trials))


def _report(console: Console, trials: list[Trial], seconds: float) -> None:
    kills = sum((trial.kills for trial in trials), Counter[str]())
    console.print(
        f"\n{kills.total()} kills: "
        + ", ".join(f"{count} {kind}" for kind, count in kills.most_common())
    )
    equal = sum(not trial.fault for trial in trials)
    console.print(f"{equal} of {len(trials)} ends bitwise equal, {seconds:.0f} s")


if __name__ == "__main__":
    main()
