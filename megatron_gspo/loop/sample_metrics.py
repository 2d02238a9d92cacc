"""Metrics of a rollout batch: rewards, lengths, turns, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gspo.agents.run_samples import COUNTS
from megatron_gspo.data.prompt_mix import MixedPrompts, of_each_source
from megatron_gspo.data.sample import FINISH_REASONS, Prompt
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.reward_scoring import in_varied_group


def sample_metrics(batch: TrainingBatch, *, version: int, supervised: bool) -> dict[str, float]:
    """``response_length/*``, ``staleness/*``, ``turns/*``, and unless supervised ``reward/*`` and
    ``groups/*``.

    version: of the weights before the batch's first update, which is the number of steps done.
    """
    table = batch.table
    lengths = table["response_length"].astype(np.float64)
    metrics = staleness(batch, version) | turn_metrics(table)
    metrics |= {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(
            np.mean(table["finish"] == FINISH_REASONS.index("length"))
        ),
    }
    if supervised:
        return metrics
    rewards = table["reward"][~np.isnan(table["reward"])]
    return metrics | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/zero_variance": 1.0 - float(np.mean(in_varied_group(table))),
    }


def source_metrics(table: np.ndarray, prompts: Sequence[Prompt]) -> dict[str, float]:
    """``sources/*`` of a batch whose prompts are of `data.sources`; empty for others.

    prompts: of the data, by index.
    """
    if not isinstance(prompts, MixedPrompts):
        return {}
    metrics = {}
    for name, chosen in of_each_source(prompts, table["prompt_index"]).items():
        rows = table[chosen]
        rewards = rows["reward"][~np.isnan(rows["reward"])]
        metrics[f"sources/{name}/prompts"] = float(len(np.unique(rows["prompt_index"])))
        if len(rewards):
            metrics[f"sources/{name}/reward"] = float(rewards.mean())
        if len(rows):
            metrics[f"sources/{name}/response_length"] = float(rows["response_length"].mean())
            metrics[f"sources/{name}/zero_variance"] = 1.0 - float(np.mean(in_varied_group(rows)))
    return metrics


def staleness(batch: TrainingBatch, version: int) -> dict[str, float]:
    """``staleness/*`` of the trained tokens, in weight versions; 0 is on-policy. A collective of
    the batch's group.

    Empty if no sample has ``token_versions``: then the engine can only sample on-policy.
    """
    if not batch.table["has_versions"].any():
        return {}
    responses = batch.responses
    behind = version - responses["token_versions"][responses["loss_mask"]].astype(np.float64)
    total, count = batch.sum(behind.sum(), len(behind))
    largest = batch.max(behind.max(initial=-np.inf))[0]
    return {"staleness/mean": total / count, "staleness/max": largest} if count else {}


def turn_metrics(table: np.ndarray) -> dict[str, float]:
    """``turns/*`` of episodes; empty for single-turn samples."""
    counts = table["turns"]
    if not counts.any():
        return {}
    return {
        "turns/mean": float(np.mean(counts)),
        "turns/max": float(np.max(counts)),
        "turns/observation_tokens": float(np.mean(table["response_length"] - table["turn_tokens"])),
    }


# Events of the runs of agents, summed over a batch.
AGENT_EVENTS = (
    "calls",
    "rows",
    "adopted",
    "undelivered",
    "malformed_calls",
    "expired_leases",
    "breaks/tools",
    "breaks/thinking",
    "breaks/rendering",
    "breaks/history",
    "breaks/new_thread",
)


def agent_metrics(batch: TrainingBatch) -> dict[str, float]:
    """``agents/*`` of a batch of runs. A collective of the batch's group."""
    runs = [sample.metadata.get(COUNTS, {}) for sample in batch.samples.values()]
    counts = batch.sum(*(sum(run.get(name, 0) for run in runs) for name in AGENT_EVENTS))
    return {f"agents/{name}": count for name, count in zip(AGENT_EVENTS, counts, strict=True)}
