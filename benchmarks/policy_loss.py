"""The policy loss with its metrics, forward and backward: against TRL's and verl's, and as a share of a training step.

*Against the peers*: GSPO on the same numbers, 1k to 1M tokens in responses of equal length, so that none computes
padding; losses and gradients must agree to 1e-5. What a batch holds beforehand (packed or padded inputs) is not timed.
Ours gives 11 metrics; verl's gives 4, TRL's 7, which it reads from the device within the call.

*Share of a step*: the loss of all micro-batches of a mini-batch against the whole optimizer step on it (packing,
forward, backward, gradient norm, Adam), with the models and responses of `step_vs_megatron.py`. These models are tiny:
the loss costs as much per token as with a large one, the step costs less, so this share is the largest. Every preset
has a row, in short responses and in long ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import ROOT, Row, Seconds, interleave, run_from_command_line, say, time_row, versions_in
from benchmarks.peers.environment import peers_python
from benchmarks.step_vs_megatron import MAX_TOKENS, SIZES, Size, make_samples, tiny_policy, write_model

SIZES_OF_LOSS = ("8x128", "32x512", "128x1024", "512x2048")  # responses x tokens
SAME = 1e-5
SHARE = 0.01  # of a step


def beside_peers(python: str, folder: Path, args: argparse.Namespace) -> list[Row]:
    """Raises ``RuntimeError`` where the worker fails or a peer computes something else."""
    sizes = SIZES_OF_LOSS[:2] if args.quick else SIZES_OF_LOSS
    command = [python, str(ROOT / "benchmarks" / "policy_loss_worker.py"), str(folder), "--repeats", str(args.repeats),
               "--sizes", *sizes]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"policy_loss_worker.py failed: {done.stderr[-2000:]}")
    rows = []
    for line in done.stdout.splitlines():
        if not line.startswith("@@ "):
            continue
        report = json.loads(line[3:])
        turns = {name: [Seconds(*turn) for turn in taken] for name, taken in report["turns"].items()}
        for peer in ("verl", "TRL"):
            if report["difference"][peer] > SAME:
                raise RuntimeError(f"{peer}'s loss is off by {report['difference'][peer]:.0e}: not the same numbers")
            name = f"policy loss, {report['tokens'] // 1024}k tokens in {report['sequences']} responses"
            rows.append(time_row("policy_loss", name, turns["ours"], turns[peer], peer_name=f"{peer}'s GSPO loss"))
    return rows


def losses_and_step(folder: Path, size: Size, groups: Any, names: Sequence[str]) -> dict[str, Callable[[], None]]:
    """The loss of each preset alone, from log-probs as leaves, over the micro-batches of a mini-batch; the whole step
    on it, of the first."""
    from megatron_gspo.algorithms import LossExtras, Objective, policy_loss, preset
    from megatron_gspo.config import ParallelConfig, TrainingConfig
    from megatron_gspo.data.sample_batch import SampleBatch
    from megatron_gspo.mcore.train_step import pack_mini_batch, train_mini_batch

    policy = tiny_policy(str(folder), ParallelConfig(), groups)
    samples = make_samples(size.sequences, size.prompt, size.response, policy.shape.vocab_size)
    objectives = {name: preset(name, **({"loss_scale_factor": 1024} if name == "dr_grpo" else {})) for name in names}
    training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=MAX_TOKENS)
    batch = SampleBatch.of(samples)
    batches = list(pack_mini_batch(policy, batch, training, optional=("old_log_probs",), routing=None).batches)
    say(f"{sum(len(batch.tokens) for batch in batches)} tokens in {len(batches)} micro-batches")

    def loss(objective: Objective) -> None:
        for batch in batches:
            assert batch.old_log_probs is not None
            extras = LossExtras(batch.num_segments, rollout_log_probs=batch.old_log_probs)
            found, _ = policy_loss(
                objective, log_probs=(batch.old_log_probs + 1e-4).requires_grad_(), old_log_probs=batch.old_log_probs,
                advantages=batch.advantages, loss_mask=batch.loss_mask, segment_ids=batch.segment_ids,
                num_sequences=batch.num_sequences, num_tokens=batch.num_tokens, extras=extras,
            )  # fmt: skip
            found.backward()

    def step() -> None:
        train_mini_batch(policy, batch, objectives[names[0]], training, temperature=1.0)

    return {name: partial(loss, objective) for name, objective in objectives.items()} | {"step": step}


def shares(args: argparse.Namespace) -> list[Row]:
    from megatron_gspo.algorithms import PRESETS
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    groups, rows = initialize(ParallelConfig(), seed=0), []
    presets = ["gspo", *(p for p in PRESETS if p != "gspo")]
    for name, size in SIZES.items():
        if args.quick:
            size = replace(size, response=64)
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, size.vocabulary)
            taken = interleave(losses_and_step(Path(folder), size, groups, presets), repeats=args.repeats, warmup=1,
                               seconds=args.seconds / len(SIZES))  # fmt: skip
        for chosen in presets:
            of = "" if chosen == "gspo" else f" of {chosen}"
            rows.append(time_row("policy_loss", f"policy loss and metrics{of}, share of a step, {name}", taken[chosen],
                                 taken["step"], peer_name="the whole optimizer step", target=SHARE))  # fmt: skip
    return rows


def measure(args: argparse.Namespace) -> tuple[list[Row], Mapping[str, Any]]:
    """The rows, and the peers' versions."""
    torch.set_num_threads(1)
    python = args.peers_python or peers_python()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, None)
        rows = beside_peers(python, Path(folder), args)
    return rows + shares(args), {"peer_versions": versions_in(python, ("trl", "verl"))}


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 15}, seconds=24, peers=True)


if __name__ == "__main__":
    main()
