"""The optimizer steps of one rollout batch: mini-batches, updates and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import ratio_quantiles
from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.loop.rollout_correction import mismatch
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import StepResult, train_mini_batch


def mini_batches(count: int, size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of the samples of each mini-batch: a permutation that depends on (seed, step, epoch) alone."""
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [order[start : start + size].tolist() for start in range(0, count, size)]


@dataclass(frozen=True)
class Update:
    """The metrics of a step's updates, and the ratios of the last one, whose policy differs most from the old one.

    samples, log_probs: the last mini-batch and ``[R]`` log-probs of each of its samples before that update. flips:
    ``[R]`` of each, see ``gather_flips``; None if not measured.
    """

    metrics: dict[str, float]
    samples: list[Sample]
    log_probs: list[np.ndarray]
    flips: list[np.ndarray] | None = None


def writes_ratios(config: Config, step: int) -> bool:
    """Whether the ratios of a step's last update are written (``tracking.ratio_interval``)."""
    interval = config.tracking.ratio_interval
    return interval > 0 and step % interval == 0


def run_optimizer_steps(
    policy: Policy, samples: Sequence[Sample], config: Config, step: int, routing: RoutingReplay, timers: Timers
) -> Update:
    """Train on a rollout batch: ``ppo_epochs`` passes, one optimizer step for each mini-batch.

    A mini-batch without a trained token is skipped and counted. Metrics are means over optimizer steps.
    """
    results: list[StepResult] = []
    trained: list[list[Sample]] = []
    skipped = 0
    clock = policy.config.timers
    if clock is not None:
        clock.take()  # it also timed the old policy's pass
    for epoch in range(config.training.ppo_epochs):
        for rows in mini_batches(
            len(samples), config.training.global_batch_size, seed=config.seed, step=step, epoch=epoch
        ):
            batch = [samples[i] for i in rows]
            if not any(sample.loss_mask.any() for sample in batch):
                skipped += 1
                continue
            with timers("train"), _explained(step):
                result = train_mini_batch(
                    policy, batch, config.algorithm, config.training,
                    temperature=config.rollout.temperature, routing=routing.update_options(len(results) + skipped),
                )  # fmt: skip
            routing.add_update(result.routing, batch, timers, flips=writes_ratios(config, step + 1))
            results.append(replace(result, routing=None))  # frees the mini-batch's routes
            trained.append(batch)
    if not results:
        return Update({"updates": 0.0, "updates/skipped": float(skipped)}, [], [])
    metrics = {"updates": float(len(results)), "updates/skipped": float(skipped)}
    metrics |= update_metrics(results, trained, config) | packing_metrics(policy, results)
    metrics |= clock.take() if clock is not None else {}
    return Update(metrics, trained[-1], results[-1].log_probs, routing.measured.flips)


@contextmanager
def _explained(step: int) -> Iterator[None]:
    """Turn Megatron's error for a non-finite gradient into a message for the user."""
    try:
        yield
    except RuntimeError as error:
        if "grad norm" not in str(error):
            raise
        raise RunError(
            f"step {step + 1}: the gradient is not finite ({first_line(error)}), so the weights were not updated; "
            "lower optimizer.lr or optimizer.clip_grad, and look at ratio_max and grad_norm of the steps before"
        ) from error


def update_metrics(
    results: Sequence[StepResult], trained: Sequence[Sequence[Sample]], config: Config
) -> dict[str, float]:
    """Averages over the updates, the mismatch in the first of them if the old log-probs are the rollout's, and on rank
    0 the quantiles of the importance ratios. trained: the mini-batch of each result."""
    averaged = _averaged([result.metrics for result in results])
    if "entropy" in averaged:  # of the policies in between; "entropy" is the old policy's
        averaged["entropy/updates"] = averaged.pop("entropy")
    metrics = {}
    if config.algorithm.old_log_probs == "rollout":  # before the first update the policy is the old one
        metrics = mismatch(trained[0], results[0].log_probs)
    metrics |= averaged
    if dist.get_rank() == 0 and config.algorithm.has_ratio:
        metrics |= _quantiles(
            [sample for batch in trained for sample in batch],
            [value for result in results for value in result.log_probs],
        )
    return metrics


def _averaged(records: Sequence[dict[str, float]]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        reduce = max if name.endswith("_max") else min if name.endswith("_min") else np.mean
        combined[name] = float(reduce(values))
    return combined


def packing_metrics(policy: Policy, results: Sequence[StepResult]) -> dict[str, float]:
    """``perf/*``: padding of the packed batches, and the share of the pipeline's time in fill and drain."""
    batches = [result.batches for result in results]
    real, packed = sum(b.real_tokens for b in batches), sum(b.packed_tokens for b in batches)
    stages, chunks = policy.groups.pp.size(), len(policy.chunks)
    bubbles = [(stages - 1) / (len(b.batches) * chunks + stages - 1) for b in batches]
    return {
        "perf/trained_tokens": float(real),
        "perf/padding": 1.0 - real / packed,
        "perf/pipeline_bubble": float(np.mean(bubbles)),
        "perf/micro_batches": float(np.mean([len(b.batches) for b in batches])),
    }


def _quantiles(samples: Sequence[Sample], log_probs: Sequence[np.ndarray]) -> dict[str, float]:
    lengths = [sample.response_length for sample in samples]
    return ratio_quantiles(
        torch.from_numpy(np.concatenate(log_probs)),
        torch.from_numpy(np.concatenate([sample.old_log_probs for sample in samples])),
        torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
        torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
    )
