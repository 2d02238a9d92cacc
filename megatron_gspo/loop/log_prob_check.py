"""Compares the servers' log-probs of some prompts with the trainer's, after a weight update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop.engines import log_servers
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.micro_batches import values_everywhere
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.rollout.group_source import GroupSource

_PROMPTS = 4


def check_log_probs(
    groups: GroupSource, policy: Policy, prompts: Sequence[Prompt], config: Config, version: int, timers: Timers
) -> dict[str, float]:
    """``log_prob_check/*``, every ``log_prob_check_interval`` updates: each server's log-probs of the first
    prompts' tokens against the policy's. Empty without servers.

    Above ``log_prob_check_tolerance`` it warns, or raises `SharedEngineError` naming server and difference.
    """
    servers = config.servers
    if not servers.log_prob_check_interval or version % servers.log_prob_check_interval:
        return {}
    with timers("log_prob_check"):
        samples = [as_sample(prompt) for prompt in islice((p for p in prompts if p.length > 1), _PROMPTS)]
        theirs = groups.score([sample.tokens for sample in samples])
        if not theirs:  # no servers, or none that answered, which is reported elsewhere
            return {}
        batch = SampleBatch.of(samples)
        found = compute_log_probs(policy, batch, config.training, temperature=1.0).log_probs
        ours = values_everywhere(found, batch, policy.groups)
        mean, largest, server = compare(ours, theirs)
    if not largest <= servers.log_prob_check_tolerance:  # NaN too
        line = (f"weights {version}: the log-prob of a token differs by {largest:.3g} nats between the trainer and "
                f"server {server}, {servers.section}.log_prob_check_tolerance is "
                f"{servers.log_prob_check_tolerance:g}; compare model, dtype and weights of both")  # fmt: skip
        if servers.log_prob_check_action == "stop":
            raise SharedEngineError(line)
        if dist.get_rank() == 0:
            log_servers(line)
    return {"log_prob_check/abs_diff": mean, "log_prob_check/abs_diff_max": largest}


def as_sample(prompt: Prompt) -> Sample:
    """A prompt whose tokens but the first count as a response, so that they have log-probs."""
    return Sample(prompt.index, 0, prompt.token_ids, 1, np.ones(prompt.length - 1, dtype=bool), None, "stop")


def compare(
    ours: Sequence[np.ndarray], theirs: Mapping[str, Sequence[np.ndarray]]
) -> tuple[float, float, str]:
    """(mean difference in nats over all servers, the largest one, its server). theirs: log-probs by server."""
    differences = {
        url: np.concatenate([np.abs(a - b) for a, b in zip(ours, values, strict=True)])
        for url, values in theirs.items()
    }
    largest = {url: float(values.max()) for url, values in differences.items()}
    worst = max(largest, key=lambda url: math.inf if math.isnan(largest[url]) else largest[url])
    total, count = sum(float(values.sum()) for values in differences.values()), sum(map(len, differences.values()))
    return total / count, largest[worst], worst
