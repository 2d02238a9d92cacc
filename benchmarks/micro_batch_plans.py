"""What it costs that the passes without a gradient take the micro-batches of a step's updates.

The same sequences on the same replicas, packed as one batch and mini-batch by mini-batch, for
lengths of prompts of 64 to 512 tokens and responses of up to 16,384, where they are cut:
- log-normal, median 1,500, sigma 1.0: one mode with a heavy tail;
- geometric, mean 2,000: the same chance to end at every token;
- bimodal: a quarter is long (log-normal, median 10,000, sigma 0.6), the others short (1,200, 0.6).

A rollout batch has 2,048 sequences and four mini-batches, a micro-batch at most 32,768 tokens.
Prints for both micro-batches of a replica and padding, and the tokens of a pass relative to one
batch: those of the slowest replica in each micro-batch. Medians over rollout batches.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from megatron_gspo.data.micro_batch_plan import (
    PackingRules,
    joined,
    plan_micro_batches,
    plan_passes,
)
from megatron_gspo.loop.step_plan import mini_batches

SEQUENCES = 2048
MINI_BATCHES = 4
GROUP = 16  # responses to a prompt, generated on one replica
REPEATS = 9
LAYOUTS = {
    "DP 8": PackingRules(8, 32_768),
    "DP 32": PackingRules(32, 32_768),
    "DP 8, CP 2, TP 4": PackingRules(8, 32_768, sequence_multiple=4, total_multiple=16),
    "DP 8, PP 4": PackingRules(8, 32_768, same_length=True),
}


def draw_lengths(distribution: str, seed: int) -> np.ndarray:
    """[SEQUENCES] tokens, prompt and response."""
    draw = np.random.default_rng(seed)
    if distribution == "log-normal":
        responses = draw.lognormal(math.log(1_500), 1.0, SEQUENCES)
    elif distribution == "geometric":
        responses = draw.geometric(1 / 2_000, SEQUENCES)
    else:
        is_long = draw.random(SEQUENCES) < 0.25
        long = draw.lognormal(math.log(10_000), 0.6, SEQUENCES)
        short = draw.lognormal(math.log(1_200), 0.6, SEQUENCES)
        responses = np.where(is_long, long, short)
    return np.clip(responses.astype(int), 1, 16_384) + draw.integers(64, 513, SEQUENCES)


def measure(distribution: str, rules: PackingRules, seed: int) -> dict[str, float]:
    lengths = draw_lengths(distribution, seed)
    size = SEQUENCES // MINI_BATCHES
    epochs = [mini_batches(SEQUENCES, size, seed=seed, step=0, epoch=0)]
    homes = np.arange(SEQUENCES) // GROUP % rules.replicas
    replica, [plans] = plan_passes(lengths, epochs, rules, homes)
    whole = plan_micro_batches(lengths, rules, replica)
    plan = joined(plans)
    return {
        "micro-batches before": len(whole.rows[0]),
        "micro-batches": len(plan.rows[0]),
        "padding before": 1 - whole.real_tokens / whole.packed_tokens,
        "padding": 1 - plan.real_tokens / plan.packed_tokens,
        "tokens": plan.step_tokens / whole.step_tokens,
    }


def main() -> None:
    print("| lengths | layout | micro-batches | padding | tokens |")
    print("| --- | --- | --- | --- | --- |")
    for distribution in ("log-normal", "geometric", "bimodal"):
        for layout, rules in LAYOUTS.items():
            runs = [measure(distribution, rules, seed) for seed in range(REPEATS)]
            median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(
                f"| {distribution} | {layout} |"
                f" {median['micro-batches before']:.0f} -> {median['micro-batches']:.0f} |"
                f" {median['padding before']:.2%} -> {median['padding']:.2%} |"
                f" {median['tokens']:.3f} |"
            )


if __name__ == "__main__":
    main()
