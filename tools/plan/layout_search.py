"""Every feasible layout with its best recomputation and token budget, ranked by estimated time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import InputError, show_bytes
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.communication import mini_batch_bytes
from megatron_gspo.tools.plan.engine_memory import Generation, check_engine, generation
from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.plan.host_costs import HostCosts, host_costs
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting
from megatron_gspo.tools.plan.layouts import feasible, name_of
from megatron_gspo.tools.plan.memory import RECOMPUTE, Memory, stage_states, worst_memory
from megatron_gspo.tools.plan.step_time import StepTime, micro_batches, model_flops, step_time
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload

BUDGETS = (1, 2, 4, 8)  # token budgets that are tried, in longest sequences


@dataclass(frozen=True)
class Plan:
    """One layout with its recomputation and token budget. ``activations``: peak bytes by recompute mode;
    ``collectives``: bytes of a mini-batch on the fullest stage, by purpose."""

    parallel: ParallelConfig
    recompute: str
    budget: int
    micro_batches: int
    memory: Memory
    activations: dict[str, float]
    collectives: dict[str, int]
    time: StepTime
    rollouts: Generation
    data_parallel: int
    model_flops: float
    host: HostCosts = HostCosts()

    def utilisation(self, cluster: Cluster) -> float:
        """Model FLOPs utilization of the training GPUs, over the time of updates and log-prob passes."""
        return self.model_flops / (self.time.training * cluster.gpus * cluster.gpu.flops)

    def to_json(self, cluster: Cluster, basis: dict[str, Any]) -> dict[str, Any]:
        """basis: of its figures, see ``basis_of``."""
        return {
            "name": name_of(self.parallel),
            "parallel": {key: value for key, value in asdict(self.parallel).items() if key.endswith("_size")},
            "data_parallel_size": self.data_parallel,
            "recompute": self.recompute,
            "max_tokens_per_micro_batch": self.budget,
            "micro_batches": self.micro_batches,
            "memory_bytes": self.memory.to_json(),
            "activations_bytes": self.activations,
            "collective_bytes": self.collectives,
            "seconds": self.time.to_json(),
            "utilisation": self.utilisation(cluster),
            "engine_concurrency": self.rollouts.concurrency,
            "host": self.host.to_json(),
            "limits": limits(self, cluster),
            "basis": basis,
        }


@dataclass(frozen=True)
class Fixed:
    """Choices that are given instead of searched: layout, recompute mode, tokens per micro-batch."""

    layout: ParallelConfig | None = None
    recompute: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Search:
    """plans: those that fit, the fastest first. refused: number of layouts that the config's checks exclude, by key.
    too_big: the layout that comes closest to fitting, as (name, missing bytes)."""

    plans: list[Plan]
    considered: int
    refused: Counter[str]
    too_big: tuple[str, float] | None


def budget_of(parallel: ParallelConfig, work: Workload, factor: int) -> int:
    """Tokens of ``factor`` sequences of the longest length, each padded as in packing."""
    multiple = parallel.total_multiple
    return factor * -(-work.longest // multiple) * multiple


def search(hf: dict[str, Any], shape: ModelShape, work: Workload, cluster: Cluster, assume: Assumptions,
           fixed: Fixed = Fixed()) -> Search:  # noqa: B008 (frozen)
    """Evaluate every valid layout, or the given one. Raises ``InputError`` if none divides model and GPUs, or if the
    model does not fit into an engine on GPUs of its own."""
    check_engine(shape, work, cluster, assume)
    layouts, refused = feasible(hf, cluster.gpus, cluster.gpu.node, work.global_batch_size)
    if fixed.layout is not None:
        layouts = [fixed.layout]
    if not layouts:
        raise InputError(
            f"--gpus {cluster.gpus}: no layout divides the model and the GPUs with at most {work.global_batch_size} "
            "data-parallel ranks (--global-batch-size); raise the batch or take a power of two of GPUs"
        )
    plans, nearest = [], None
    for parallel in layouts:
        found, lacking = best_of(shape, parallel, work, cluster, assume, fixed)
        if found is not None:
            plans.append(found)
        elif nearest is None or lacking < nearest[1]:
            nearest = (name_of(parallel), lacking)
    plans.sort(key=lambda plan: plan.time.total)
    return Search(plans, len(layouts), refused, nearest)


def no_fit(found: Search, work: Workload, cluster: Cluster, assume: Assumptions) -> InputError:
    """The error if no layout fits."""
    name, lacking = found.too_big or ("none", 0.0)
    return InputError(
        f"--gpus {cluster.gpus}: none of {found.considered} layouts fits into {cluster.gpus} x {cluster.gpu.name} "
        f"({show_bytes(cluster.gpu.memory)} each, {100 * assume.reserve:g} % left free); {name} comes closest and "
        f"lacks {show_bytes(lacking)} per GPU with full recomputation and the smallest micro-batch; use more or "
        "larger GPUs"
        + (", or separate engine GPUs (--engine sglang)" if cluster.engine in ("colocated", "embedded") else "")
        + (", or a shorter --response-length" if work.longest > 4096 else "")
    )


def best_of(shape: ModelShape, parallel: ParallelConfig, work: Workload, cluster: Cluster, assume: Assumptions,
            fixed: Fixed) -> tuple[Plan | None, float]:
    """The fastest recomputation and token budget that fit with the reserve free; otherwise None and the bytes that
    the smallest choice lacks."""
    inputs = PlanInputs(shape, work, cluster, assume)
    room = cluster.gpu.memory * (1 - assume.reserve)
    states = stage_states(shape, parallel, cluster.gpus, work.dtype_bytes, work.lora)
    hopeless = max(held.total for held in states.values()) + assume.runtime_gib * GIB > room
    per_rank = work.global_batch_size / parallel.data_parallel_size(cluster.gpus) * assume.packing_imbalance
    per_rank *= work.mean_length(assume.mean_response)
    best, lacking = None, float("inf")
    budgets = [fixed.budget] if fixed.budget else [budget_of(parallel, work, factor) for factor in BUDGETS]
    for budget in budgets:
        count = micro_batches(per_rank, budget, parallel)
        for mode in (fixed.recompute,) if fixed.recompute else RECOMPUTE[-1:] if hopeless else RECOMPUTE:
            memory = worst_memory(inputs, parallel, states, budget, count, _setting(work, mode))
            rollouts = generation(shape, work, cluster, assume, memory.held)
            over = max(memory.total - room, rollouts.shortfall / cluster.engine_tensor)
            lacking = min(lacking, over)
            if over > 0:
                continue
            time = step_time(inputs, parallel, budget, _setting(work, mode), rollouts)
            if best is None or time.total < best.time.total:
                best = Plan(
                    parallel, mode, budget, count, memory, {}, {}, time, rollouts,
                    parallel.data_parallel_size(cluster.gpus), model_flops(shape, work, assume),
                )  # fmt: skip
            break  # a mode that recomputes more takes longer
        if hopeless or count == 1 or count == parallel.pipeline_model_parallel_size:
            break  # a larger budget changes nothing
    if best is None:
        return None, lacking
    modes = {
        mode: worst_memory(
            inputs, parallel, states, best.budget, best.micro_batches, _setting(work, mode)
        ).activations
        for mode in RECOMPUTE
    }
    usual = MicroBatch(int(per_rank / best.micro_batches), work.longest)
    sent = mini_batch_bytes(shape, parallel, cluster.gpus, best.memory.stage, usual, best.micro_batches,
                            _setting(work, best.recompute))  # fmt: skip
    return replace(best, activations=modes, collectives=sent, host=host_costs(inputs, parallel)), lacking


def _setting(work: Workload, recompute: str) -> Setting:
    return Setting(work.dtype_bytes, work.implementation, recompute, lora=work.lora)


def limits(plan: Plan, cluster: Cluster) -> list[str]:
    """The three largest parts of the step time with a remedy each, as short texts."""
    time = plan.time
    parts = {
        "generation": (time.generation, _why_generation(plan)),
        "products": (time.products + time.attention, "compute-bound: more GPUs, or shorter responses"),
        "recomputation": (time.recompute, f"recompute {plan.recompute}: more memory would avoid it"),
        "tensor parallelism": (time.tensor, "gathers and scatters in every layer: a smaller TP"),
        "expert all-to-all": (time.expert, _why_experts(plan, cluster)),
        "context parallelism": (time.context, "keys and values of other ranks: a smaller CP"),
        "pipeline bubble": (time.bubble + time.pipeline, f"{plan.micro_batches} micro-batches per stage: more, VP or a "
                            "smaller PP"),
        "gradients": (time.data, "reduced once per mini-batch: a larger global batch, overlap_grad_reduce"),
        "optimizer": (time.optimizer, "reads and writes Adam's state once per mini-batch"),
        "new weights": (time.sync,
                        "every GPU of an engine receives all weights over its own link: a faster network"),
        "samples": (time.host, "the first rank of a replica receives and packs them: more replicas"),
        "fixed": (time.other, "rewards, logging"),
    }  # fmt: skip
    ranked = sorted(parts.items(), key=lambda part: -part[1][0])
    return [f"{name} {100 * seconds / time.total:.0f} %: {why}" for name, (seconds, why) in ranked[:3] if seconds > 0]


def _why_generation(plan: Plan) -> str:
    tail = plan.rollouts.tail / max(plan.rollouts.seconds, 1e-9)
    if tail > 0.5:
        return "the longest responses decode alone: rollout.oversampling, or max_staleness"
    return f"{plan.rollouts.concurrency:.0f} concurrent sequences per engine: more engines, or more memory"


def _why_experts(plan: Plan, cluster: Cluster) -> str:
    span = plan.parallel.expert_model_parallel_size * plan.parallel.expert_tensor_size
    return "EP crosses nodes: keep it within one" if span > cluster.gpu.node else "tokens go to their experts and back"
