"""The optimizer steps of one rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_gspo.algorithms import ratio_quantiles
from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.mismatch import mismatch
from megatron_gspo.loop.routing import add_update, update_options
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.train_step import StepResult, train_mini_batch
from megatron_gspo.routing_replay.step_metrics import StepRouting


def mini_batches(count: int, size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of the samples of each mini-batch: a permutation that depends on (seed, step, epoch) alone."""
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [order[start : start + size].tolist() for start in range(0, count, size)]


@dataclass(frozen=True)
class Update:
    """The metrics of a step's updates, and the ratios of the last one, which is the furthest from the old policy.

    samples, log_probs: the last mini-batch and ``[R]`` log-probs of each of its samples before that update. flips:
    ``[R]`` of each, as ``gather_flips`` gives them; None where they weren't measured.
    """

    metrics: dict[str, float]
    samples: list[Sample]
    log_probs: list[np.ndarray]
    flips: list[np.ndarray] | None = None


def writes_ratios(config: Config, step: int) -> bool:
    """Whether the ratios of a step's last update are written (``tracking.ratio_interval``)."""
    interval = config.tracking.ratio_interval
    return interval > 0 and step % interval == 0


def update(run: Run, samples: Sequence[Sample], step: int, timers: Timers, routing: StepRouting) -> Update:
    """Train on a rollout batch: ``epochs`` passes, one optimizer step a mini-batch.

    A mini-batch without a trained token is skipped and counted. Means are over optimizer steps.
    """
    config = run.config
    results: list[StepResult] = []
    trained: list[list[Sample]] = []
    skipped = 0
    clock = run.policy.config.timers
    if clock is not None:
        clock.take()  # the old policy's pass went by it too
    for epoch in range(config.training.ppo_epochs):
        for rows in mini_batches(
            len(samples), config.training.global_batch_size, seed=config.seed, step=step, epoch=epoch
        ):
            batch = [samples[i] for i in rows]
            if not any(sample.loss_mask.any() for sample in batch):
                skipped += 1
                continue
            with timers("train"):
                result = _train(run, batch, step)
            add_update(routing, result.routing, batch, timers, flips=writes_ratios(config, step + 1))
            results.append(replace(result, routing=None))  # a mini-batch's routes needn't outlive it
            trained.append(batch)
    metrics = {"updates": float(len(results)), "updates/skipped": float(skipped)}
    if not results:
        return Update(metrics, [], [])
    averaged = _averaged([result.metrics for result in results])
    if "entropy" in averaged:  # of the policies in between; "entropy" is the old policy's
        averaged["entropy/updates"] = averaged.pop("entropy")
    if config.algorithm.old_log_probs == "rollout":  # before the first update its policy is the old one
        metrics |= mismatch(trained[0], results[0].log_probs)
    metrics |= averaged | _packing(run, results) | (clock.take() if clock is not None else {})
    if run.is_writer and run.objective.has_ratio:
        metrics |= _quantiles(
            [sample for batch in trained for sample in batch],
            [value for result in results for value in result.log_probs],
        )
    return Update(metrics, trained[-1], results[-1].log_probs, routing.flips)


def _train(run: Run, batch: Sequence[Sample], step: int) -> StepResult:
    """``train_mini_batch``; Megatron's refusal of a gradient that isn't finite becomes a message to the user."""
    temperature = run.config.rollout.temperature
    try:
        return train_mini_batch(
            run.policy, batch, run.objective, run.batching, temperature=temperature, routing=update_options(run)
        )
    except RuntimeError as error:
        if "grad norm" not in str(error):
            raise
        raise RunError(
            f"step {step + 1}: the gradient is not finite ({first_line(error)}), so the weights were left as they are; "
            "lower optimizer.lr or optimizer.clip_grad, and look at ratio_max and grad_norm of the steps before"
        ) from error


def _averaged(records: Sequence[dict[str, float]]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        reduce = max if name.endswith("_max") else min if name.endswith("_min") else np.mean
        combined[name] = float(reduce(values))
    return combined


def _packing(run: Run, results: Sequence[StepResult]) -> dict[str, float]:
    """Padding share of the packed batches and the share of the pipeline's time that its fill and drain take."""
    batches = [result.batches for result in results]
    real, packed = sum(b.real_tokens for b in batches), sum(b.packed_tokens for b in batches)
    stages, chunks = run.policy.groups.pp.size(), len(run.policy.chunks)
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
