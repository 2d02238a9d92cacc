"""What it costs that the passes without a gradient take the micro-batches of a step's updates.

The same sequences on the same replicas, packed as one batch and mini-batch by mini-batch, for
lengths of prompts of 64 to 512 tokens and responses of up to 16,384, where they are cut:
- log-normal, median 1,500, sigma 1.0: one mode with a heavy tail;
- geometric, mean 2,000: the same chance to end at every token;
- bimodal: a quarter is long (log-normal, median 10,000, sigma 0.6), the others short (1,200, 0.6).

A rollout batch has 2,048 sequences and four mini-batches, a micro-batch at most 32,768 tokens.
Prints micro-batches of a replica, padding, and the tokens of the slowest replica micro-batch by
micro-batch, relative to one batch; medians over rollout batches. With a pipeline, also the
estimated time of a pass with its fill and drain, relative to one batch.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from megatron_gspo.data.micro_batch_plan import (
    MicroBatchPlan,
    PackingRules,
    plan_micro_batches,
    plan_passes,
)
from megatron_gspo.loop.step_plan import mini_batches

SEQUENCES = 2048
MINI_BATCHES = 4
GROUP = 16  # responses to a prompt, generated on one replica
REPEATS = 9
STAGES = 4
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


def pass_time(plans: list[MicroBatchPlan], stages: int) -> float:
    """Of a forward pass, in tokens: each plan's schedule fills and drains the pipeline."""
    return sum(plan.step_tokens * (1 + (stages - 1) / len(plan.rows[0])) for plan in plans)


def measure(distribution: str, rules: PackingRules, seed: int) -> dict[str, float]:
    lengths = draw_lengths(distribution, seed)
    size = SEQUENCES // MINI_BATCHES
    epochs = [mini_batches(SEQUENCES, size, seed=seed, step=0, epoch=0)]
    homes = np.arange(SEQUENCES) // GROUP % rules.replicas
    replica, [plans] = plan_passes(lengths, epochs, rules, homes)
    whole = plan_micro_batches(lengths, rules, replica)
    packed = sum(plan.packed_tokens for plan in plans)
    stages = STAGES if rules.same_length else 1
    return {
        "micro-batches before": len(whole.rows[0]),
        "micro-batches": sum(len(plan.rows[0]) for plan in plans),
        "padding before": 1 - whole.real_tokens / whole.packed_tokens,
        "padding": 1 - whole.real_tokens / packed,
        "tokens": sum(plan.step_tokens for plan in plans) / whole.step_tokens,
        "time": pass_time(plans, stages) / pass_time([whole], stages),
    }


def main() -> None:
    print("| lengths | layout | micro-batches | padding | tokens | time of a pass |")
    print("| --- | --- | --- | --- | --- | --- |")
    for distribution in ("log-normal", "geometric", "bimodal"):
        for layout, rules in LAYOUTS.items():
            runs = [measure(distribution, rules, seed) for seed in range(REPEATS)]
            median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(
                f"| {distribution} | {layout} |"
                f" {median['micro-batches before']:.0f} -> {median['micro-batches']:.0f} |"
                f" {median['padding before']:.2%} -> {median['padding']:.2%} |"
                f" {median['tokens']:.3f} | {median['time']:.3f} |"
            )


if __name__ == "__main__":
    main()
