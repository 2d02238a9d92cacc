"""Run directories that look like real ones, made in milliseconds.

Written through RunDirectory, like a run's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_gspo.tools.compare.finished_runs import study_of
from megatron_gspo.tracking.run_directory import RunDirectory

LAYERS, EXPERTS, TOP_K = 4, 16, 4


@dataclass(frozen=True)
class Course:
    """How a made-up run goes.

    fails: after this step, with an error; level: accuracy that it tends to.
    """

    level: float = 0.7
    speed: float = 0.08
    collapses: int | None = None
    fails: int | None = None
    clipped: float = 0.02
    flips: float = 0.08
    overrides: dict[str, Any] = field(default_factory=dict)


def config(run_dir: Path, seed: int, steps: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """A resolved config, as far as anything here reads it."""
    made: dict[str, Any] = {
        "seed": seed,
        "run_dir": str(run_dir),
        "model": {"path": "nowhere", "dtype": "float32"},
        "algorithm": {
            "name": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.27,
            "old_log_probs": "recompute",
        },
        "rollout": {"rollout_batch_size": 16, "n_samples_per_prompt": 8},
        "training": {"steps": steps, "global_batch_size": 32},
        "routing": {"replay": "none"},
        "optimizer": {"lr": 5e-4},
    }
    for key, value in overrides.items():
        section, _, leaf = key.rpartition(".")
        (made.setdefault(section, {}) if section else made)[leaf] = value
    return made


def write_run(run_dir: Path, seed: int, course: Course, *, steps: int = 30, every: int = 5) -> Path:
    """A run directory with metrics, config and an end; returns it."""
    random = np.random.default_rng([seed, int(1e4 * course.level)])
    settings = config(run_dir, seed, steps, course.overrides)
    last = steps if course.fails is None else course.fails
    with RunDirectory(run_dir) as directory:
        environment = {
            "python": "3.11.9",
            "versions": {"torch": "2.13.0"},
            "git_revision": "abc",
            "platform": "here",
        }
        directory.write_config(settings, environment)
        directory.log(
            0,
            {"eval/accuracy": 0.2 + 0.01 * random.normal(), "time/step": 1.0, "time/evaluate": 0.9},
        )
        for step in range(1, last + 1):
            directory.log(step, _record(step, course, random, every))
        if course.fails is None:
            directory.write_summary(
                {"step": steps, "wall_seconds": steps * 0.9, "exit": "finished"}
            )
        else:
            failure = {"exit_code": 1, "message": f"step {last + 1}: the gradient is not finite"}
            (run_dir / "failure.json").write_text(json.dumps(failure))
    return run_dir


def _record(step: int, course: Course, random: np.random.Generator, every: int) -> dict[str, float]:
    height = (
        0.2 + (course.level - 0.2) * (1 - math.exp(-course.speed * step)) + 0.01 * random.normal()
    )
    if course.collapses is not None and step > course.collapses:
        height = 0.05
    tokens = 128 * 17 + int(random.integers(-50, 50))
    times = {
        "generate": 0.14,
        "verify": 0.002,
        "log_probs": 0.15,
        "train": 0.42,
        "weight_sync": 0.005,
        "forward": 0.13,
        "backward": 0.22,
        "optimizer": 0.05,
        "routing": 0.004,
    }
    record = {f"time/{name}": value * (1 + 0.05 * random.random()) for name, value in times.items()}
    record |= {
        "reward/mean": height + 0.02 * random.normal(),
        "clip_fraction/tokens": course.clipped * random.random() * (step > 1),
        "clip_fraction/sequences": 2 * course.clipped * random.random(),
        "routing/flip_rate": course.flips * (0.8 + 0.4 * random.random()),
        "routing/flipped_tokens": min(1.0, 4 * course.flips),
        "routing/rollout_flip_rate": 0.0,
        "routing/entropy": 2.5 - 0.005 * step,
        "routing/load_imbalance": 1.6,
        "routing/replay_bytes": (
            float(tokens * LAYERS * TOP_K) if course.overrides.get("routing.replay") else 0.0
        ),
        "effective_sample_size": 0.99,
        "entropy": 0.9 * math.exp(-0.03 * step),
        "kl/old_policy": 0.001,
        "perf/tokens": float(tokens),
        "perf/peak_memory_gib": 0.8,
        "time/step": (
            sum(
                v
                for k, v in record.items()
                if k[5:] in ("generate", "log_probs", "train", "routing")
            )
            + 0.03
        ),
    }
    if not course.flips:
        record = {name: value for name, value in record.items() if not name.startswith("routing/")}
    if step % every == 0:
        record |= {"eval/accuracy": min(1.0, max(0.0, height)), "time/evaluate": 0.4}
        record["time/step"] += 0.4
    return record


VARIANTS: dict[str, Course] = {
    "grpo": Course(level=0.62, flips=0.09),
    "grpo_r2": Course(level=0.66, overrides={"algorithm.name": "grpo", "routing.replay": "r2"}),
    "grpo_r3": Course(level=0.65, overrides={"algorithm.name": "grpo", "routing.replay": "r3"}),
    "gspo": Course(
        level=0.72,
        clipped=0.3,
        overrides={
            "algorithm.name": "gspo",
            "algorithm.epsilon_low": 0.01,
            "algorithm.epsilon_high": 0.015,
        },
    ),
    "gspo_token": Course(
        level=0.715,
        clipped=0.3,
        overrides={
            "algorithm.name": "gspo_token",
            "algorithm.epsilon_low": 0.01,
            "algorithm.epsilon_high": 0.015,
        },
    ),
    "gspo_rollout": Course(
        level=0.71,
        clipped=0.3,
        overrides={
            "algorithm.name": "gspo",
            "algorithm.epsilon_low": 0.01,
            "algorithm.epsilon_high": 0.015,
            "algorithm.old_log_probs": "rollout",
        },
    ),
}


def write_comparison(
    folder: Path,
    *,
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    steps: int = 30,
    names: Sequence[str] = tuple(VARIANTS),
) -> Path:
    """A comparison file of the named variants. Its runs are the caller's to write."""
    settings = {
        "title": "Made-up runs",
        "folder": str(folder / "out"),
        "base": str(Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml"),
        "overrides": {
            "training.steps": steps,
            "rollout.rollout_batch_size": 16,
            "training.global_batch_size": 32,
        },
        "baseline": "grpo",
        "seeds": list(seeds),
        "variants": [
            {"name": name, "overrides": VARIANTS[name].overrides or {"algorithm.name": "grpo"}}
            for name in names
        ],
    }
    file = folder / "compare.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def compared(folder: Path, courses: dict[str, Course], seeds=(1, 2, 3)):
    """A study of run directories, one folder a variant and seed."""
    paths = [
        write_run(folder / name / str(seed), seed, course, steps=10)
        for name, course in courses.items()
        for seed in seeds
    ]
    return study_of(paths, "command")
