"""Rewards and advantages of samples, and which of them count: in the loss, and in their group's statistics.

| response                       | its reward in the group's mean and std | its tokens in the loss |
| ------------------------------ | -------------------------------------- | ---------------------- |
| scored                         | yes                                    | yes                    |
| not scored (verifier failed)   | no                                     | no                     |
| aborted by the engine          | no                                     | no                     |
| cut off, ``truncated: mask``   | yes                                    | no                     |
| a log-prob that isn't finite   | yes                                    | no                     |
| of no token                    | yes                                    | there are none         |
| far from the rollout engine's  | yes                                    | no (``loop/mismatch``) |

The reward of a response that was neither scored nor finished is unknown: any number in its place would move its
group's baseline. The others are draws of the policy with a known reward, which the baseline needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import group_advantages, kl_penalty, overlong_penalty, zero_variance_groups
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.servers import generate as generate_on_servers
from megatron_gspo.loop.servers import is_central
from megatron_gspo.loop.timers import Timers
from megatron_gspo.loop.turns import advantages_by_turn, generate_episodes, score_episodes
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_exchange import generate_spread


def sample_and_score(
    run: Run,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    timers: Timers,
) -> tuple[list[Sample], Counter[str]]:
    """Scored responses to ``prompts`` on every rank, and failures by kind: see ``generate`` and ``score``."""
    with timers("generate"):
        samples = generate(run, engine, prompts, sampling, seed)
    return samples, score(run, samples, prompts, timers)


def generate(
    run: Run, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> list[Sample]:
    """Responses to ``prompts`` on every rank, prompt-major: each rank generates a share, or servers do all."""
    if run.environments is not None:
        return generate_episodes(run, engine, prompts, sampling, seed)
    if is_central(engine):
        return generate_on_servers(run, prompts, sampling, seed)
    return generate_spread(
        engine,
        prompts,
        sampling,
        seed=seed,
        group=dist.group.WORLD,
        device=compute_device(),
        vocab_size=run.policy.shape.vocab_size,
    )


def score(run: Run, samples: Sequence[Sample], prompts: Sequence[Prompt], timers: Timers) -> Counter[str]:
    """Give every sample its reward on every rank, each scoring a share; returns failures by kind.

    The reward of a failed verification is ``data.verifier_failure_reward`` or NaN; its reason is in the metadata.
    """
    if run.environments is not None:
        return score_episodes(samples, run.config.data.verifier_failure_reward)
    with timers("verify"):
        rank, size = dist.get_rank(), dist.get_world_size()
        scores = run.scorer.score(samples[rank::size], prompts)
        rewards = torch.zeros(len(samples), dtype=torch.float64)
        rewards[rank::size] = torch.from_numpy(scores.rewards).double()
        names = sorted(scores.counts)
        both = torch.cat([rewards, torch.tensor([float(scores.counts[name]) for name in names], dtype=torch.float64)])
        both = both.to(compute_device())
        dist.all_reduce(both)
        for sample, reward in zip(samples, both[: len(samples)].tolist(), strict=True):
            sample.reward = reward
        failures = Counter(dict(zip(names, map(int, both[len(samples) :].tolist()), strict=True)))
        if failures.total():
            _attach_reasons(samples, scores.statuses, scores.messages)
    return failures


def _attach_reasons(samples: Sequence[Sample], statuses: Sequence[str], messages: Sequence[str]) -> None:
    """Tell every rank why its peers' samples have no score; a collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {
        rank + i * size: f"{status}: {message}"
        for i, (status, message) in enumerate(zip(statuses, messages, strict=True))
        if status != "ok"
    }
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    for place, reason in (item for found in everyone for item in found.items()):
        samples[place].metadata = {**samples[place].metadata, FAILURE: reason}


def require_scores(run: Run, samples: Sequence[Sample]) -> None:
    """Raise ``VerifierError`` where not one response has a score: the verifier is broken, not the responses."""
    if all(math.isnan(sample.reward) for sample in samples):
        reason = next((sample.metadata[FAILURE] for sample in samples if FAILURE in sample.metadata), "no reason given")
        environment = run.config.rollout.environment
        who = f"environment {environment!r}" if environment else f"verifier {run.config.data.resolved_verifier!r}"
        raise VerifierError(
            f"{who} failed on all {len(samples)} responses of a batch "
            f"(the first: {reason}); mend it"
        )


def is_compared(sample: Sample) -> bool:
    """Whether a response's reward counts in its group's mean and standard deviation: see the top of this file."""
    return math.isfinite(sample.reward) and sample.finish_reason != "abort"


def varied(samples: Sequence[Sample]) -> list[bool]:
    """For each sample, whether the rewards of its group that count differ."""
    compared = [sample for sample in samples if is_compared(sample)]
    rewards = torch.tensor([sample.reward for sample in compared], dtype=torch.float64)
    groups = torch.tensor([sample.prompt_index for sample in compared], dtype=torch.int64)
    keep = zero_variance_groups(rewards, groups).keep.tolist()
    good = {sample.prompt_index for sample, kept in zip(compared, keep, strict=True) if kept}
    return [sample.prompt_index in good for sample in samples]


def mask(run: Run, samples: list[Sample]) -> dict[str, float]:
    """Take samples out of the loss, which shrinks N too, and count them by the first reason that applies."""
    counts: Counter[str] = Counter(empty=0, truncated=0, unscored=0, non_finite=0)
    for sample in samples:
        reason = _reason_to_mask(sample, truncated=run.config.algorithm.truncated == "mask")
        if reason:
            counts[reason] += 1
            sample.loss_mask = np.zeros_like(sample.loss_mask)
    return {f"masked/{name}": float(count) for name, count in counts.items()}


def _reason_to_mask(sample: Sample, *, truncated: bool) -> str:
    if not sample.loss_mask.any():
        return "empty"
    if sample.finish_reason == "abort" or (truncated and sample.finish_reason == "length"):
        return "truncated"
    if not math.isfinite(sample.reward):
        return "unscored"
    values = (sample.old_log_probs, sample.ref_log_probs)
    finite = all(value is None or bool(np.isfinite(value[sample.loss_mask]).all()) for value in values)
    return "" if finite else "non_finite"


def attach_advantages(run: Run, samples: list[Sample]) -> None:
    """Group advantages of the shaped rewards, broadcast to the response's tokens (with ``turn_discount`` each turn its
    own); 1 for demonstrations, 0 for those whose reward doesn't count."""
    if run.config.algorithm.turn_discount is not None:
        compared = [is_compared(sample) for sample in samples]
        advantages_by_turn(run.config.algorithm, samples, shaped_rewards(run, samples), compared)
        return
    if run.config.algorithm.is_supervised:
        values = torch.ones(len(samples))
    else:
        values = torch.zeros(len(samples))
        compared = torch.tensor([is_compared(sample) for sample in samples])
        values[compared] = group_advantages(
            torch.from_numpy(shaped_rewards(run, samples))[compared],
            torch.tensor([sample.prompt_index for sample in samples])[compared],
            std=run.objective.advantage_std,
            baseline=run.objective.advantage_baseline,
        )
    for sample, value in zip(samples, values.tolist(), strict=True):
        sample.advantages = np.full(sample.response_length, value, dtype=np.float32)


def shaped_rewards(run: Run, samples: Sequence[Sample]) -> np.ndarray:
    """Rewards [N] float64 less the overlong penalty (DAPO) and the KL to the reference, summed over the response."""
    algorithm = run.config.algorithm
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    if algorithm.truncated == "penalize":
        lengths = torch.tensor([sample.response_length for sample in samples])
        rewards += overlong_penalty(
            lengths,
            max_length=run.config.rollout.max_response_length,
            buffer=algorithm.overlong_buffer_len,
            factor=algorithm.overlong_penalty_factor,
        ).numpy()
    if algorithm.kl_reward_coef:
        for i, sample in enumerate(samples):
            old, reference = torch.from_numpy(sample.old_log_probs), torch.from_numpy(sample.ref_log_probs)
            kl = kl_penalty(old, reference, run.objective.kl_loss_type)
            rewards[i] -= algorithm.kl_reward_coef * float(kl[torch.from_numpy(sample.loss_mask)].sum())
    return rewards
