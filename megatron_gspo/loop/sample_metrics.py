"""Metrics of a rollout batch: rewards, lengths, turns, staleness, throughput."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import in_varied_group


def sample_metrics(samples: Sequence[Sample], *, version: int, supervised: bool) -> dict[str, float]:
    """``response_length/*``, ``staleness/*``, ``turns/*``, and unless supervised ``reward/*`` and ``groups/*``.

    version: of the weights before the batch's first update, which is the number of steps done.
    """
    lengths = np.array([sample.response_length for sample in samples], dtype=np.float64)
    found = staleness(samples, version) | turn_metrics(samples)
    found |= {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
    if supervised:
        return found
    rewards = np.array([sample.reward for sample in samples if not math.isnan(sample.reward)])
    return found | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/zero_variance": 1.0 - float(np.mean(in_varied_group(samples))),
    }


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """``staleness/*`` of the trained tokens, in weight versions; 0 is on-policy.

    Empty if no sample has ``token_versions``: then the engine can only sample on-policy.
    """
    if all(sample.token_versions is None for sample in samples):
        return {}
    behind = version - np.concatenate([sample.trained_versions for sample in samples])
    if not behind.size:
        return {}
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """``turns/*`` of episodes; empty for single-turn samples."""
    counts = [len(spans(sample)) for sample in samples]
    if not any(counts):
        return {}
    observed = [sample.response_length - sum(s.end - s.start for s in spans(sample)) for sample in samples]
    return {
        "turns/mean": float(np.mean(counts)),
        "turns/max": float(np.max(counts)),
        "turns/observation_tokens": float(np.mean(observed)),
    }


def throughput(
    samples: Sequence[Sample], times: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """The step's times, tokens per second (prompts and responses) and peak memory in GiB.

    ``perf/tokens_per_second`` counts the rollout batch once over the whole step, ``perf/train_tokens_per_second`` every
    pass over it in the time of the updates. metrics: of the updates.
    """
    tokens = sum(sample.length for sample in samples)
    found = {
        **times,
        "perf/tokens": float(tokens),
        "perf/tokens_per_second": tokens / times["time/step"],
        "perf/peak_memory_gib": peak_memory() / 2**30,
    }
    if times.get("time/train"):
        found["perf/train_tokens_per_second"] = metrics.get("perf/trained_tokens", 0.0) / times["time/train"]
    return found


def peak_memory() -> int:
    """Bytes: the GPU's largest allocation, or this process's largest resident size where there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
