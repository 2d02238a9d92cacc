"""How fast a step was: tokens a second, model FLOPs over the peak of the GPUs, idle time."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import BatchTable
from megatron_gspo.gpus import gpu_of_device
from megatron_gspo.loop.sample_flops import SampleFlops
from megatron_gspo.loop.step_plan import StepPlan


@dataclass(frozen=True)
class StepWork:
    """What a step computed, over all ranks."""

    tokens: int
    """Prompt and response tokens of the rollout batch."""

    generated: int
    """Tokens of it that the policy generated; 0 in supervised training."""

    log_prob_flops: float
    """Of the passes without a gradient."""

    training_flops: float
    """Of the updates, each product once."""

    recomputed_flops: float
    """What the updates computed again for their backward passes."""


def step_work(
    batch: BatchTable,
    policy: SampleFlops,
    config: Config,
    plan: StepPlan,
    *,
    updates_policy: bool,
    critic: SampleFlops | None = None,
) -> StepWork:
    """The work of a step.

    Args:
        updates_policy: whether the policy was trained, and not the value model alone.
        critic: of the value model, where one is trained.
    """
    trains = config.training.only != "rollout"
    passes = config.algorithm.has_ratio and config.algorithm.old_log_probs == "recompute"
    scored = policy.forward * (passes + config.algorithm.needs_reference) * trains
    trained = policy.trained * updates_policy
    recomputed = policy.recomputed * updates_policy
    if critic is not None and trains:
        scored = scored + critic.forward
        trained = trained + critic.trained
        recomputed = recomputed + critic.recomputed
    updates = [
        update.positions
        for update in plan.updates
        if batch.table["trained"][update.positions].any()
    ]
    return StepWork(
        tokens=int(batch.lengths.sum()),
        generated=0 if config.algorithm.is_supervised else int(policy.scored.sum()),
        log_prob_flops=float(scored.sum()),
        training_flops=float(sum(trained[positions].sum() for positions in updates)),
        recomputed_flops=float(sum(recomputed[positions].sum() for positions in updates)),
    )


def gpu_peak(config: Config) -> float | None:
    """FLOPs a second of this rank's GPU in the model's type; None where it is not known, and on a
    CPU.
    """
    if not torch.cuda.is_available() or config.model.dtype != "bfloat16":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name())
    return None if gpu is None else gpu.flops


def missing_peak_line(config: Config) -> str | None:
    """Why a run on GPUs has no ``perf/mfu``; None where it has, and on a CPU."""
    if not torch.cuda.is_available() or gpu_peak(config) is not None:
        return None
    name = torch.cuda.get_device_name()
    return f"perf/mfu is left out: the peak of {name} in {config.model.dtype} is not known"


def throughput(
    work: StepWork,
    times: Mapping[str, float],
    metrics: Mapping[str, float],
    *,
    peak: float | None,
    generation_gpus: int | None,
) -> dict[str, float]:
    """The step's times, and ``perf/*`` of them.

    Args:
        metrics: of the updates and the servers.
        peak: of a GPU, FLOPs a second; None leaves out the shares of it.
        generation_gpus: that generate; None where it is not known.
    """
    step = times["time/step"]
    rates = {
        **times,
        "perf/tokens": float(work.tokens),
        "perf/tokens_per_second": work.tokens / step,
        "perf/peak_memory_gib": peak_memory() / 2**30,
    }
    training = times.get("time/train", 0.0) + times.get("time/train_critic", 0.0)
    scoring = times.get("time/log_probs", 0.0) + times.get("time/values", 0.0)
    gpus = dist.get_world_size() if dist.is_initialized() else 1
    if times.get("time/train"):
        trained_tokens = metrics.get("perf/trained_tokens", 0.0)
        rates["perf/train_tokens_per_second"] = trained_tokens / times["time/train"]
    if work.training_flops and training:
        speed = work.training_flops / training / gpus
        rates["perf/tflops_per_gpu"] = speed / 1e12
        rates["perf/recomputed"] = work.recomputed_flops / work.training_flops
        if peak is not None:
            rates["perf/mfu"] = speed / peak
    if work.log_prob_flops and scoring:
        speed = work.log_prob_flops / scoring / gpus
        rates["perf/log_probs_tflops_per_gpu"] = speed / 1e12
        if peak is not None:
            rates["perf/log_probs_mfu"] = speed / peak
    return rates | _generation(work, times, metrics, generation_gpus)


def _generation(
    work: StepWork,
    times: Mapping[str, float],
    metrics: Mapping[str, float],
    gpus: int | None,
) -> dict[str, float]:
    """Tokens a second while responses are generated: by the engine in the trainer's processes,
    which waits for it, or by servers, which also generate while it trains.
    """
    step = times["time/step"]
    seconds = times.get("time/generate", 0.0)
    rates = {}
    busy = metrics.get("time/servers_busy", seconds)
    if "time/servers_busy" in metrics:
        rates["perf/trainer_idle"] = seconds / step
        rates["perf/servers_idle"] = max(1 - busy / step, 0.0)
    if busy and work.generated:
        speed = work.generated / busy
        rates["perf/generated_tokens_per_second"] = speed
        if gpus:
            rates["perf/generated_tokens_per_second_per_gpu"] = speed / gpus
    return rates


def peak_memory() -> int:
    """Bytes: the GPU's largest allocation, or this process's largest resident size where there
    is no GPU.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
