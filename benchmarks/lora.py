"""Adapters of rank 8 on all linear layers beside training all weights: time and memory of a step, in one process.

Both are one model with the same samples: forward and backward with GSPO, and the optimizer step. Times are in float32
on one core. The bytes of weights, gradient buffers and optimizer are those of bfloat16 models; the peak is that of what
a step makes (activations, and gradients that have no buffer), in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import Row, count_row, interleave, run_from_command_line, say, time_row
from benchmarks.live_storages import LiveStorages, storage_bytes
from benchmarks.step_vs_megatron import MAX_TOKENS, make_samples, tiny_policy
from tests.support.tiny_models import save_tiny_model

SIZES = dict(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
             num_experts=16, num_experts_per_tok=4, moe_intermediate_size=192, vocab_size=4096,
             initializer_range=0.02)  # fmt: skip
SEQUENCES, PROMPT, RESPONSE = 8, 64, 448
RANK = 8
# The products with the frozen weights remain, forward and to the input: time falls by a third at most.
TIME_TARGET, STATES_TARGET = 1.0, 0.2


def step_of(policy: Any, samples: list[Any]) -> Callable[[], None]:
    """One whole training step."""
    from megatron_gspo.algorithms import preset
    from megatron_gspo.config import TrainingConfig
    from megatron_gspo.data.sample_batch import SampleBatch
    from megatron_gspo.mcore.train_step import train_mini_batch

    training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=MAX_TOKENS)
    batch, objective = SampleBatch.of(samples), preset("gspo")

    def step() -> None:
        train_mini_batch(policy, batch, objective, training, temperature=1.0)

    return step


def state_bytes(policy: Any) -> int:
    """Bytes of all weights, of gradient buffers and of the optimizer's state after a step."""
    from megatron_gspo.mcore.policy_tensors import gradients, optimizer_states, weights

    chunks = policy.chunks
    kept = [*weights(chunks), *gradients(chunks), *optimizer_states(chunks, policy.optimizer)]
    return sum(storage_bytes(kept).values())


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes alive at once of what one step makes."""
    with LiveStorages() as live:
        step()
    return live.peak


def measure(args: argparse.Namespace) -> list[Row]:
    """Rows of time, states and peak: ours is adapters, the peer all weights."""
    from megatron_gspo.config import LoRAConfig, ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    torch.set_num_threads(1)
    layout = ParallelConfig()
    groups = initialize(layout, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder) / "model", **SIZES)
        samples = make_samples(SEQUENCES, PROMPT, RESPONSE, SIZES["vocab_size"])
        kinds = {"ours": LoRAConfig(rank=RANK, alpha=2.0 * RANK), "all weights": None}
        steps = {name: step_of(tiny_policy(path, layout, groups, lora=lora), samples) for name, lora in kinds.items()}
        say(f"a step with adapters of rank {RANK} and with all weights")
        taken = interleave(steps, repeats=args.repeats, warmup=1, seconds=args.seconds)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        states = {}
        for name, lora in kinds.items():
            trained = tiny_policy(path, layout, groups, dtype="bfloat16", lora=lora)
            step_of(trained, samples)()
            states[name] = state_bytes(trained)
    common = dict(peer_name="all weights trained")
    return [
        time_row("lora", f"training step, rank {RANK}", taken["ours"], taken["all weights"], target=TIME_TARGET,
                 **common),
        count_row("lora", f"weights, gradients and optimizer, bfloat16, rank {RANK}", states["ours"] / 2**20,
                  states["all weights"] / 2**20, unit="MiB", target=STATES_TARGET, **common),
        count_row("lora", f"peak of what a step makes, rank {RANK}", peaks["ours"] / 2**20,
                  peaks["all weights"] / 2**20, unit="MiB", **common),
    ]  # fmt: skip


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 12}, seconds=120)


if __name__ == "__main__":
    main()
