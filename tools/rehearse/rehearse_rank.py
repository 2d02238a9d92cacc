"""One rank's training step on a fake GPU: the program's own code from the model to the plan of a
checkpoint.

Import within ``fake_cuda``: Megatron looks for a GPU while it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import plan_micro_batches
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import show_bytes
from megatron_gspo.loop.critic import with_values
from megatron_gspo.loop.log_probs import with_log_probs
from megatron_gspo.loop.policies import build_policies
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.checkpoint.owned_state import make_state
from megatron_gspo.mcore.megatron_options import MegatronOptions
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.mcore.policy import Policy, check_megatron_options
from megatron_gspo.mcore.policy_tensors import gradients, optimizer_states, weights
from megatron_gspo.mcore.process_groups import ProcessGroups, every_group, initialize, shutdown
from megatron_gspo.mcore.train_step import StepResult, train_mini_batch
from megatron_gspo.mcore.value_steps import train_critic_mini_batch
from megatron_gspo.models import ModelShape, family_of, read_config
from megatron_gspo.routing_replay.perturbation import load_perturbation
from megatron_gspo.tools.rehearse.checkpoint_plan import plan_checkpoint
from megatron_gspo.tools.rehearse.fake_device.fused_functions import fused_functions
from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.fake_world import fake_world
from megatron_gspo.tools.rehearse.mini_batch import (
    MiniBatchPlan,
    plan_mini_batch,
    synthetic_batch,
    with_plan,
)
from megatron_gspo.tools.rehearse.recorder import Recorder
from megatron_gspo.tools.rehearse.records import CheckpointPlan, RankRecord
from megatron_gspo.tools.rehearse.weight_export import export

_HOST_BYTES = 2**20  # larger host tensors of a checkpoint's plan are fake


@dataclass
class _Run:
    """What a rehearsal has so far."""

    config: Config
    shape: ModelShape
    recorder: Recorder
    seconds: dict[str, float] = field(default_factory=dict)
    checkpoint: CheckpointPlan | None = None
    sent_weights: int = 0

    @contextlib.contextmanager
    def phase(self, name: str, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.recorder.phase(name, kind):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def rehearse_rank(config: Config, rank: int, world: int, gpu: FakeGpu) -> RankRecord:
    """Play ``rank`` of ``world``: build the policy and its critic, score and train one mini-batch,
    export the weights, plan a checkpoint. The weights are never loaded.

    Raises ``RehearsalError`` where a value or a result is unknown, and what the program itself
    raises.
    """
    with fused_functions(gpu.host), fake_world(rank, world, gpu.collectives):
        return play_rank(config, rank, world, gpu)


def play_rank(config: Config, rank: int, world: int, recorder: Recorder) -> RankRecord:
    """The step of `rehearse_rank` as the rank that this process is in torch's process group,
    within ``recorder``.
    """
    plan = plan_mini_batch(config, world)
    run = _Run(with_plan(config, plan), family_of(read_config(config.model.path))[1], recorder)
    with (
        torch.autograd.set_multithreading_enabled(False),
        recorder.memory.watch_resizes(),
        recorder,
    ):
        policy, reference = _build(run, _megatron_options(config))
        gc.collect()
        gc.freeze()  # the collector need not look at the model again
        try:
            result = _train(run, policy, reference, plan)
            with run.phase("weight_export", "buffers"), torch.no_grad():
                run.sent_weights = export(policy, config)
            with run.phase("checkpoint_plan", "buffers"):
                recorder.fake_host_bytes = _HOST_BYTES
                run.checkpoint = plan_checkpoint(policy)
            return _record(run, policy.groups, rank, world, plan, result)
        finally:
            gc.unfreeze()
            shutdown(keep_distributed=True)


def _megatron_options(config: Config) -> MegatronOptions:
    shape = family_of(read_config(config.model.path))[1]
    return check_megatron_options(
        config.megatron, shape, config.parallel, config.model, config.optimizer, config.routing
    )


def _build(run: _Run, options: MegatronOptions) -> tuple[Policy, Policy | None]:
    config = run.config
    memory = run.recorder.memory
    random = replace(config, model=replace(config.model, init="random"))  # loads no weights
    with run.phase("build", "buffers"):
        groups = initialize(config.parallel, seed=config.seed)
        policy, reference = build_policies(random, groups, options)
        for trained in policy.trained.values():
            make_state(trained)  # so that the rehearsed step is like any later one
    sizes: dict[str, int] = {}
    for trained in policy.trained.values():
        for kind, tensors in (
            ("optimizer", optimizer_states(trained.chunks, trained.optimizer)),
            ("gradients", gradients(trained.chunks)),
            ("weights", weights(trained.chunks)),
        ):
            sizes[kind] = sizes.get(kind, 0) + memory.relabel(kind, tensors)
    if reference is not None and policy.trained_lora is None:
        sizes["reference"] = memory.relabel("weights", weights(reference.chunks))
    memory.states = sizes
    return policy, reference


def _train(
    run: _Run, policy: Policy, reference: Policy | None, plan: MiniBatchPlan
) -> tuple[int, ...]:
    """Log-probs, forward-backward and optimizer step; tokens of each micro-batch."""
    config = run.config
    routes = policy.routes
    imbalance = run.recorder.imbalance
    rules = packing_rules(config.training, policy.config, policy.groups)
    length = config.data.max_prompt_length + config.rollout.max_response_length
    whole = plan_micro_batches(np.full(plan.samples, length), rules)
    steps = StepPlan(rules, whole.replica_of(), [], whole)
    batch = synthetic_batch(
        config,
        steps.replica,
        policy.groups.dp,
        run.shape.vocab_size,
        routes,
        imbalance=imbalance,
    )
    routing = RoutingReplay(
        config.routing,
        routes,
        config.algorithm.has_ratio,
        load_perturbation(config.routing),
        seed=config.seed,
    )
    with run.phase("old_log_probs", "activations"):
        batch, _ = with_log_probs(batch, policy, reference, config, steps, routing, Timers(), {})
    if policy.critic is not None:
        _train_critic(run, policy.critic, batch, steps)
    with _optimizer_phase(run, policy), run.phase("forward_backward", "activations"):
        result: StepResult = train_mini_batch(
            policy,
            batch,
            config.algorithm,
            config.training,
            temperature=config.rollout.temperature,
            routing=routing.update_options(0),
            plan=whole,
            distillation=config.distillation,
            score_centering=config.algorithm.centering,
        )
    return tuple(int(batch.tokens.shape[0]) for batch in result.batches.batches)


def _train_critic(run: _Run, critic: Policy, batch: TrainingBatch, steps: StepPlan) -> None:
    """Values, and the value model's optimizer step on the mini-batch."""
    with run.phase("values", "activations"):
        batch = with_values(batch, critic, run.config, steps, Timers())
    batch = batch.with_column("returns", batch.responses["values"])
    with run.phase("critic", "activations"):
        train_critic_mini_batch(
            critic,
            batch,
            run.config.training,
            value_clip=run.config.critic.value_clip,
            plan=steps.first_epoch,
        )


@contextlib.contextmanager
def _optimizer_phase(run: _Run, policy: Policy) -> Iterator[None]:
    """Within the context the optimizer's steps are a phase of their own."""
    optimizer: Any = policy.optimizer  # of which the method is replaced
    original = optimizer.step

    def step() -> tuple[bool, float, int | None]:
        start = time.perf_counter()
        with run.phase("optimizer", "optimizer"):
            result = original()
        run.seconds["forward_backward"] = run.seconds.get("forward_backward", 0.0) - (
            time.perf_counter() - start
        )
        return result

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step


def _record(
    run: _Run,
    groups: ProcessGroups,
    rank: int,
    world: int,
    plan: MiniBatchPlan,
    tokens: tuple[int, ...],
) -> RankRecord:
    recorder = run.recorder
    names = ("pp", "tp", "cp", "dp", "ep", "expert_tp")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    return RankRecord(
        rank=rank,
        world=world,
        coordinates={name: getattr(groups, name).rank() for name in names},
        groups={
            name: recorder.collectives.ranks_of(group)
            for name, group in every_group().items()
            if name != "world"
        },
        phases=tuple(run.seconds),
        micro_batches=tokens,
        collectives=recorder.collectives.collectives,
        host_syncs=recorder.host.syncs,
        host_copies=recorder.host.copies,
        findings=recorder.host.findings,
        memory=recorder.memory.result(),
        checkpoint=run.checkpoint,
        flops=recorder.flops.counts,
        seconds=run.seconds,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions=versions,
        sent_weights=run.sent_weights,
        groups_of_world=recorder.collectives.groups_of_world,
        groups_of_rank=recorder.collectives.groups_of_rank,
        ops=recorder.ops.totals,
        issued_ops=recorder.ops.issued,
        notes=_notes(run, plan),
    )


def _notes(run: _Run, plan: MiniBatchPlan) -> tuple[str, ...]:
    notes = ["torch layers: Transformer Engine's kernels are not rehearsed"]
    if plan.of_all != plan.micro_batches:
        notes.append(f"{plan.micro_batches} micro-batches were run; a mini-batch has {plan.of_all}")
    notes.append(f"routing: imbalance {run.recorder.imbalance:g}")
    if run.sent_weights:
        notes.append(f"sends {show_bytes(run.sent_weights)} of the weights")
    distillation = run.config.distillation
    if distillation.is_on:
        left_out = "the teachers' own passes"
        if distillation.takes_all_ids:
            left_out += " and the divergence over all ids"
        notes.append(f"not rehearsed: {left_out}")
    log = run.recorder.collectives
    notes.append(
        f"{log.groups_of_world:,} process groups are made at the start; the rank is in"
        f" {log.groups_of_rank}"
    )
    return tuple(notes)
