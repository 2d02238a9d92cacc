"""A training checkpoint: waiting time of the loop, a synchronous save and a load, against
Megatron's.

One process, a random Qwen3-MoE with Adam in float32; a step is the old policy's pass and one update
with ``--sequences`` sequences, without generation: 128 prompts with 8 responses of about 48 tokens,
where real steps have hundreds of thousands of tokens (a save grows with the parameters, a step with
parameters times tokens: the share depends on the tokens alone). A turn is a save that begins before
a step and is polled after it and after the next, as the loop does, then the other saves and the
loads of the same state. Every save is on the disk when it counts as done (fsync).
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import Row, Seconds, Spread, ratios, run_from_command_line, say, timed
from benchmarks.step_vs_megatron import make_samples, tiny_policy

KEEP = 2


class Contest:
    """The timed operations on one policy. Only `step` changes the policy."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from megatron_gspo.config import ParallelConfig
        from megatron_gspo.mcore.process_groups import initialize
        from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

        self.folder = folder
        self.number = 0
        self.image: Any = None
        size = TinyModel(
            hidden=args.hidden, layers=args.layers, experts=16, expert_width=args.hidden // 2
        )
        self.parameters = write_tiny_model(folder / "model", size)
        self.policy = tiny_policy(
            str(folder / "model"), ParallelConfig(), initialize(ParallelConfig(), seed=0)
        )
        self.samples = make_samples(args.sequences, 16, 48, self.policy.shape.vocab_size)

    def step(self) -> None:
        from megatron_gspo.algorithms import preset
        from megatron_gspo.config import TrainingConfig
        from megatron_gspo.data.training_batch import TrainingBatch
        from megatron_gspo.mcore.train_step import compute_log_probs, train_mini_batch

        training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=4096)
        compute_log_probs(
            self.policy,
            TrainingBatch.of(self.samples),
            training,
            temperature=1.0,
            with_entropy=True,
        )
        train_mini_batch(
            self.policy, TrainingBatch.of(self.samples), preset("gspo"), training, temperature=1.0
        )

    def _next(self) -> int:
        self.number += 1
        return self.number

    def begin(self) -> Any:
        """The first wait of the loop."""
        from megatron_gspo.mcore.checkpoint.save_load import begin_save, make_image

        self.image = self.image or make_image(self.policy)
        return begin_save(
            self.policy, self.folder / "ours", self._next(), {}, keep=KEEP, image=self.image
        )

    def save(self) -> None:
        from megatron_gspo.mcore.checkpoint.save_load import save_checkpoint

        save_checkpoint(self.policy, self.folder / "ours", self._next(), {}, keep=KEEP)

    def load(self) -> None:
        from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint

        load_checkpoint(self.policy, self.folder / "ours" / f"step_{self.number:06d}")

    def _sharded(self, is_loading: bool) -> dict[str, Any]:
        """As Megatron's own training script makes it, in the format that loads in any layout."""
        from megatron_gspo.mcore.forward_step import unwrap

        model = unwrap(self.policy.chunks[0]).sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.policy.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer}

    def megatron_save(self) -> None:
        from megatron.core import dist_checkpointing

        folder = self.folder / "megatron"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        dist_checkpointing.save(self._sharded(False), str(folder))

    def megatron_load(self) -> None:
        from megatron.core import dist_checkpointing

        from megatron_gspo.mcore.forward_step import unwrap

        loaded = dist_checkpointing.load(self._sharded(True), str(self.folder / "megatron"))
        for optimizer in self.policy.optimizer.chained_optimizers:
            _complete_steps(optimizer)
        unwrap(self.policy.chunks[0]).load_state_dict(loaded["model"])
        self.policy.optimizer.load_state_dict(loaded["optimizer"])


def _complete_steps(optimizer: Any) -> None:
    """Upstream fails on the step count of torch's Adam (KeyError: 'step'), which it leaves out
    of what it has read.
    """
    store = type(optimizer)._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda parameter, tensors: store(
        optimizer, parameter, {"step": torch.zeros(()), **tensors}
    )


def turn(contest: Contest) -> dict[str, Seconds]:
    """Everything once. Raises ``RuntimeError`` where a save isn't whole after two steps."""
    saves: list[Any] = []
    waits = [timed(lambda: saves.append(contest.begin()))]
    contest.step()
    waits.append(timed(saves[0].poll))  # all is written; it is published during the next step
    taken = {"step": timed(contest.step)}
    waits.append(timed(saves[0].poll))
    if saves[0].path.name.startswith("."):
        raise RuntimeError("the save took longer than two steps: give steps more --sequences")
    taken["wait"] = Seconds(sum(wait.wall for wait in waits), sum(wait.cpu for wait in waits))
    for name in ("save", "megatron_save", "load", "megatron_load"):
        taken[name] = timed(getattr(contest, name))
    return taken


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows of the table."""
    torch.set_num_threads(1)
    if args.quick:
        args.repeats = min(args.repeats, 2)
        args.sequences = min(args.sequences, 128)
        args.hidden = 128
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(Path(folder), args)
        tokens = sum(sample.length for sample in contest.samples)
        everything = contest.samples
        contest.samples = contest.samples[:64]
        contest.step()
        contest.save()
        contest.megatron_save()  # starts the server that its later saves use
        contest.samples = everything
        stored = (
            sum(
                file.stat().st_size for file in (Path(folder) / "ours").glob(f"*{contest.number}/*")
            )
            / 1e6
        )
        say(
            f"checkpoint: {contest.parameters:,} parameters, {stored:.0f} MB, steps of {tokens:,}"
            " tokens"
        )
        started = time.perf_counter()
        turns = []
        while len(turns) < args.repeats and (
            len(turns) < 3 or time.perf_counter() - started < args.seconds
        ):
            turns.append(turn(contest))
    taken = {name: [result[name] for result in turns] for name in turns[0]}
    note = (
        f"{contest.parameters / 1e6:.1f} million parameters, {stored:.0f} MB, steps of {tokens:,}"
        " tokens"
    )
    row = functools.partial(_row, taken, note)
    return [
        row("wait of the loop for an asynchronous save", "wait", "step", "a training step"),
        row("synchronous save", "save", "megatron_save", "dist_checkpointing.save"),
        row("load", "load", "megatron_load", "dist_checkpointing.load"),
    ]


def _row(
    taken: dict[str, list[Seconds]],
    note: str,
    name: str,
    ours: str,
    peer: str,
    peer_name: str,
) -> Row:
    """Without the CPU time: that of the writers isn't this process's."""
    wall = [[1e3 * seconds.wall for seconds in taken[key]] for key in (ours, peer)]
    return Row(
        "checkpoint",
        name,
        peer_name,
        "ms",
        "lower",
        ratios(*wall),
        Spread.of(wall[0]),
        Spread.of(wall[1]),
        note=note,
    )


def main() -> None:
    run_from_command_line(
        __doc__, measure, {"repeats": 4, "sequences": 1024, "hidden": 256, "layers": 4}, seconds=75
    )


if __name__ == "__main__":
    main()
