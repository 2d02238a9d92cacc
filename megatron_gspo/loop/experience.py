"""Samples that are ready to train on: generated, verified, filtered, with old log-probs and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import (
    group_advantages,
    kl_penalty,
    mismatch_metrics,
    overlong_penalty,
    zero_variance_groups,
)
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.rollout_buffer import Rollout, read_rollout, write_rollout
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.groups import compute_device
from megatron_gspo.mcore.random_state import ROLLOUT, UPDATE, seed_generators
from megatron_gspo.mcore.step import compute_log_probs
from megatron_gspo.rollout.engine import SamplingParams
from megatron_gspo.rollout.spread import generate_spread


@dataclass(frozen=True)
class Experience:
    """One rollout batch, the same on every rank, and where the prompt source stands after it."""

    samples: list[Sample]
    cursor: int
    metrics: dict[str, float]


def rollout_seed(seed: int, step: int) -> int:
    """A step's sampling seed: rollouts depend on (seed, step, prompt, sample) alone, so a resumed run repeats them."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def collect(run: Run, step: int, cursor: int, timers: Timers, *, checkpoint: Path | None = None) -> Experience:
    """Generate and score one rollout batch and give every sample its old log-probs and advantages.

    ``checkpoint``: that of the weights as they are, if there is one. The rollouts are kept in it, and taken from it
    where an earlier life of the run has left them.
    """
    seed_generators(run.config.seed, step, ROLLOUT)
    keeps = checkpoint is not None and not run.config.algorithm.is_supervised
    rollout = read_rollout(run, checkpoint) if keeps else None
    if rollout is None:
        rollout = _rollout(run, step, cursor, timers)
        if keeps:
            write_rollout(run, checkpoint, rollout)
    seed_generators(run.config.seed, step, UPDATE)
    samples, metrics = rollout.samples, dict(rollout.metrics)
    if run.objective.has_ratio or run.reference is not None:
        with timers("log_probs"):
            metrics |= _attach_log_probs(run, samples)
    metrics |= _mask(run, samples)
    _attach_advantages(run, samples)
    metrics |= _describe(samples, supervised=run.config.algorithm.is_supervised)
    return Experience(samples, rollout.cursor, metrics)


def sample_and_score(
    run: Run, engine: object, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int, timers: Timers
) -> tuple[list[Sample], Counter[str]]:
    """Scored responses to ``prompts`` on every rank, and failures by kind; each rank generates and scores a share."""
    with timers("generate"):
        samples = generate_spread(engine, prompts, sampling, seed=seed, group=dist.group.WORLD, device=compute_device())
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
    return samples, Counter(dict(zip(names, map(int, both[len(samples) :].tolist()), strict=True)))


def _rollout(run: Run, step: int, cursor: int, timers: Timers) -> Rollout:
    """One batch of groups; with ``zero_variance_groups: refill`` groups that teach nothing are sampled anew, at most
    ``max_refills`` times, after which they are kept (their advantage is 0)."""
    config = run.config
    if config.algorithm.is_supervised:
        prompts, cursor = run.source.batch(cursor, config.rollout.rollout_batch_size)
        with timers("generate"):
            return Rollout(run.engine.generate(prompts, run.sampling, seed=0), cursor, {})
    size, n = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    refills = config.algorithm.max_refills if config.algorithm.zero_variance_groups == "refill" else 0
    kept: list[Sample] = []
    flat: list[Sample] = []
    failures: Counter[str] = Counter()
    generated = 0
    for attempt in range(refills + 1):
        prompts, cursor = run.source.batch(cursor, size - len(kept) // n)
        used = {sample.prompt_index for sample in kept + flat}
        prompts = [prompt for prompt in prompts if prompt.index not in used]
        if not prompts:  # a small data set has been drawn whole
            continue
        samples, counts = sample_and_score(
            run,
            run.engine,
            prompts,
            run.sampling,
            rollout_seed(config.seed, step * (refills + 1) + attempt),
            timers,
        )
        failures.update(counts)
        generated += len(prompts)
        keep = _varied(samples) if refills else [True] * len(samples)
        kept += [sample for sample, good in zip(samples, keep, strict=True) if good]
        flat += [sample for sample, good in zip(samples, keep, strict=True) if not good]
        if len(kept) >= size * n:
            break
    metrics = {f"verifier/{name}": float(count) for name, count in failures.items()}
    metrics["groups/generated"] = float(generated)
    return Rollout(kept + flat[: size * n - len(kept)], cursor, metrics)


def _varied(samples: Sequence[Sample]) -> list[bool]:
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = torch.tensor([sample.prompt_index for sample in samples])
    return zero_variance_groups(rewards, groups).keep.tolist()


def _attach_log_probs(run: Run, samples: list[Sample]) -> dict[str, float]:
    """``old_log_probs`` from the training engine (or the rollout's own), ``ref_log_probs`` where a KL asks for them."""
    temperature = run.config.rollout.temperature
    metrics: dict[str, float] = {}
    if run.config.algorithm.old_log_probs == "rollout":
        old = [sample.rollout_log_probs for sample in samples]
        if any(value is None for value in old):
            raise ValueError("algorithm.old_log_probs=rollout: the engine returned no log-probs; use 'recompute'")
    else:
        old, entropy = compute_log_probs(run.policy, samples, run.batching, temperature=temperature, with_entropy=True)
        metrics = _mismatch(samples, old) | {"entropy": _mean(entropy, samples)}
    for sample, value in zip(samples, old, strict=True):
        sample.old_log_probs = value
    if run.reference is not None:
        reference, _ = compute_log_probs(run.reference, samples, run.batching, temperature=temperature)
        for sample, value in zip(samples, reference, strict=True):
            sample.ref_log_probs = value
    return metrics


def _mismatch(samples: Sequence[Sample], log_probs: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the rollout engine's log-probs are from the training engine's for the same weights."""
    if any(sample.rollout_log_probs is None for sample in samples):
        return {}
    train, rollout = (
        torch.from_numpy(np.concatenate(log_probs)),
        torch.from_numpy(_joined(samples, "rollout_log_probs")),
    )
    mask = torch.from_numpy(_joined(samples, "loss_mask"))
    found = mismatch_metrics(train, rollout, mask, num_tokens=max(int(mask.sum()), 1))
    return {name: float(value) for name, value in found.items()}


def _joined(samples: Sequence[Sample], field: str) -> np.ndarray:
    return np.concatenate([getattr(sample, field) for sample in samples])


def _mean(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> float:
    mask = _joined(samples, "loss_mask")
    return float(np.concatenate(values)[mask].mean()) if mask.any() else float("nan")


def _mask(run: Run, samples: list[Sample]) -> dict[str, float]:
    """Take samples out of the loss: aborted, truncated where asked, log-probs that aren't finite. N shrinks too."""
    counts: Counter[str] = Counter(truncated=0, non_finite=0)
    for sample in samples:
        aborted = sample.finish_reason == "abort"
        if aborted or (run.config.algorithm.truncated == "mask" and sample.finish_reason == "length"):
            counts["truncated"] += 1
        elif _finite(sample):
            continue
        else:
            counts["non_finite"] += 1
        sample.loss_mask = np.zeros_like(sample.loss_mask)
    return {f"masked/{name}": float(count) for name, count in counts.items()}


def _finite(sample: Sample) -> bool:
    values = (sample.old_log_probs, sample.ref_log_probs)
    return all(value is None or bool(np.isfinite(value[sample.loss_mask]).all()) for value in values)


def _attach_advantages(run: Run, samples: list[Sample]) -> None:
    """Group advantages of the shaped rewards, broadcast to the response's tokens; 1 for demonstrations."""
    if run.config.algorithm.is_supervised:
        values = torch.ones(len(samples))
    else:
        values = group_advantages(
            torch.from_numpy(shaped_rewards(run, samples)),
            torch.tensor([sample.prompt_index for sample in samples]),
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
            buffer=algorithm.overlong_buffer,
            factor=algorithm.overlong_penalty_factor,
        ).numpy()
    if algorithm.kl_reward_coef:
        for i, sample in enumerate(samples):
            old, reference = torch.from_numpy(sample.old_log_probs), torch.from_numpy(sample.ref_log_probs)
            kl = kl_penalty(old, reference, run.objective.kl_estimator)
            rewards[i] -= algorithm.kl_reward_coef * float(kl[torch.from_numpy(sample.loss_mask)].sum())
    return rewards


def _describe(samples: Sequence[Sample], *, supervised: bool) -> dict[str, float]:
    lengths = np.array([sample.response_length for sample in samples], dtype=np.float64)
    found = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
    if supervised:
        return found
    rewards = np.array([sample.reward for sample in samples])
    varied = _varied(samples)
    return found | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/zero_variance": 1.0 - float(np.mean(varied)),
    }
