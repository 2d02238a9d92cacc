"""The same training on the embedded engine and on two real SGLang servers: do the curves agree, and what does it cost?

    python benchmarks/rollout_engines.py runs/demo/cold_start/hf

Every variant trains the same model on the same prompts with several seeds: with the embedded engine, with SGLang and
each way of the weights, and with SGLang one step ahead of the training (`rollout.overlap`). Seeds are interleaved, so
that all meet the same machine. The servers are started once; each run sends them its weights first. The trainer
is one process and makes two epochs over each rollout batch: with two cores, a trainer that mostly waits leaves nothing
to overlap. Samples per second are those of the rollout batches over the time of the steps, without evaluation.
Intervals are 95 %, by Student's t over paired seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from benchmarks.common import ROOT, hardware, say, versions
from benchmarks.result_files import save

CONFIG = ROOT / "examples" / "qwen3_moe" / "tiny_gspo.yaml"
ON_SERVERS = {"rollout.engine": "sglang", "sglang.health_interval": 2.0}
AHEAD = {"rollout.overlap": True, "rollout.max_staleness": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "embedded": {},
    "sglang, disk": ON_SERVERS | {"sglang.weight_transport": "disk"},
    "sglang, tensor": ON_SERVERS | {"sglang.weight_transport": "tensor"},
    "sglang, distributed": ON_SERVERS | {"sglang.weight_transport": "distributed"},
    "sglang, one step ahead": ON_SERVERS | {"sglang.weight_transport": "tensor"} | AHEAD,
}
SYNCHRONOUS, ASYNCHRONOUS = "sglang, tensor", "sglang, one step ahead"


def train(model: str, run_dir: Path, seed: int, steps: int, changes: Mapping[str, Any], urls: Sequence[str]) -> None:
    """One run in a process of its own; its output is shown if it fails."""
    settings = {
        "run_dir": run_dir, "model.path": model, "seed": seed, "training.steps": steps, "checkpoint.save_interval": 0,
        "checkpoint.export_hf": False, "training.ppo_epochs": 2,
        "evaluation.eval_interval": 0, "evaluation.max_prompts": 200, "tracking.plot": False,
        "optimizer.lr_warmup_steps": 5,
        "parallel.tensor_model_parallel_size": 1, "parallel.expert_model_parallel_size": 1, **changes,
    }  # fmt: skip
    if "rollout.engine" in changes:
        settings["sglang.urls"] = json.dumps(list(urls))
    overrides = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "megatron_gspo.train", str(CONFIG), *overrides], env=env, text=True,
                          capture_output=True)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{run_dir.name} failed: {done.stderr[-2000:]}")


def read(run_dir: Path) -> dict[str, Any]:
    """Curves and figures of a finished run."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    rollout = yaml.safe_load((run_dir / "config.yaml").read_text())["rollout"]
    later = steps[1:]  # the first step waits for what one step ahead has begun before all others
    seconds = sum(record["time/step"] - record.get("time/evaluate", 0.0) for record in later)
    samples = len(later) * rollout["rollout_batch_size"] * rollout["n_samples_per_prompt"]
    return {
        "reward": [record["reward/mean"] for record in steps],
        "accuracy_before": records[0]["eval/accuracy"],
        "accuracy": steps[-1]["eval/accuracy"],
        "samples_per_second": samples / seconds,
        "mismatch_abs_max": max(record["mismatch/abs_diff_max"] for record in steps),
        "staleness_mean": sum(record.get("staleness/mean", 0.0) for record in steps) / len(steps),
        "generate": sum(record["time/generate"] for record in steps) / len(steps),
        "weight_sync": sum(record["time/weight_sync"] for record in steps) / len(steps),
        "step": seconds / (len(steps) - 1),
    }


def summarise(runs: Mapping[str, Mapping[int, dict[str, Any]]]) -> list[str]:
    """The table, in Markdown, and the two verdicts."""
    from megatron_gspo.tools.compare.statistics import interval, paired_difference

    def pick(name: str, key: str) -> dict[int, float]:
        return {seed: run[key] for seed, run in runs[name].items()}

    lines = ["| variant | accuracy before | after | less embedded | samples/s | step | generate | weight sync | "
             "staleness |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name, found in runs.items():
        after, speed = (interval(list(pick(name, key).values())) for key in ("accuracy", "samples_per_second"))
        less = paired_difference(pick(name, "accuracy"), pick("embedded", "accuracy"))
        mean = {key: sum(pick(name, key).values()) / len(found) for key in
                ("accuracy_before", "step", "generate", "weight_sync", "staleness_mean")}  # fmt: skip
        difference = "" if name == "embedded" or less is None else between(less, "{:+.1f}", 100)
        lines.append(
            f"| {name} | {mean['accuracy_before']:.1%} | {after.mean:.1%} | {difference} | {speed.mean:.0f} | "
            f"{mean['step']:.2f} s | {mean['generate']:.2f} s | {mean['weight_sync']:.2f} s | "
            f"{mean['staleness_mean']:.2f} |"
        )
    ahead, behind = (pick(name, "samples_per_second") for name in (ASYNCHRONOUS, SYNCHRONOUS))
    if ahead:
        ratios = [ahead[seed] / behind[seed] for seed in ahead]
        found = interval(ratios)
        what = f"{ASYNCHRONOUS}: times the samples/s of {SYNCHRONOUS} ({len(ratios)} seeds): "
        lines += ["", what + between(found, "{:.2f}")]
    return lines


def between(found: Any, form: str, scale: float = 1.0) -> str:
    """A mean and, where there is one, its interval."""
    mean = form.format(scale * found.mean)
    if found.low is None:
        return mean
    return f"{mean} ({form.format(scale * found.low)} to {form.format(scale * found.high)})"


def draw(runs: Mapping[str, Mapping[int, dict[str, Any]]], file: Path) -> None:
    """Mean reward by step, a band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, found in runs.items():
        curves = np.array([run["reward"] for run in found.values()])
        smooth = np.array([np.convolve(curve, np.ones(5) / 5, mode="valid") for curve in curves])
        steps = np.arange(3, 3 + smooth.shape[1])
        (line,) = axes.plot(steps, smooth.mean(0), label=name)
        axes.fill_between(steps, smooth.min(0), smooth.max(0), alpha=0.12, color=line.get_color(), linewidth=0)
    axes.set(xlabel="step", ylabel="reward of the rollouts (mean of 5 steps)", title="The same training, other engines")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face directory to start from: a cold start, such as the demo's")
    parser.add_argument("--python", help="interpreter with sglang (default: .venv-sglang, made if it's absent)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write runs and versions to this file")
    parser.add_argument("--picture", type=Path, help="draw the reward curves into this file")
    args = parser.parse_args()
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
    from megatron_gspo.servers.server_processes import LocalServers
    from megatron_gspo.tools.server_environment import server_python

    python = args.python or server_python("sglang")
    runs: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in VARIANTS}
    machine = hardware()
    with tempfile.TemporaryDirectory() as folder:
        config = SGLangConfig(num_servers=2, python=python)
        with LocalServers(SGLangLaunch(config, args.model, "float32", log_dir=folder)) as servers:
            for seed in range(1, args.seeds + 1):
                for name, changes in VARIANTS.items():
                    run_dir = Path(folder) / f"{seed}-{name.replace(' ', '-')}"
                    train(args.model, run_dir, seed, args.steps, changes, servers.urls)
                    runs[name][seed] = read(run_dir)
                    say(f"seed {seed}, {name}: {runs[name][seed]['accuracy']:.1%}, "
                        f"{runs[name][seed]['samples_per_second']:.0f} samples/s")  # fmt: skip
                if args.json:  # after each seed: this takes long
                    more = {"hardware": machine, "versions": versions(), "steps": args.steps, "table": summarise(runs)}
                    save(args.json, {"runs": runs, **more})
    print("\n".join(summarise(runs)))
    if args.picture:
        draw(runs, args.picture)


if __name__ == "__main__":
    main()
