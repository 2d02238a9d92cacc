"""What every rank runs: each scenario in each cut, then optimizer steps, all compared with the
reference at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import finish_metrics
from megatron_gspo.config import TrainingConfig
from megatron_gspo.data.packing import OPTIONAL_FIELDS, context_parallel_shard
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import output_weight, unwrap
from megatron_gspo.mcore.hf_weights import export_layers, export_weights, held_tensors
from megatron_gspo.mcore.lora.adapter_weights import adapter_layers
from megatron_gspo.mcore.micro_batches import MicroBatches
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.mcore.process_groups import compute_device, initialize
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.teacher_states import TeacherStates
from megatron_gspo.mcore.train_step import (
    combined_shares,
    compute_log_probs,
    finished_metrics,
    forward_backward,
    mini_batch_routes,
    pack_mini_batch,
    summed_metrics,
    train_mini_batch,
)
from megatron_gspo.parallel.scored_rows import ScoredRows
from tests.equivalence.cases import (
    ALL,
    CUTS,
    OPTIMIZER,
    OPTIMIZER_STEPS,
    OTHER_CUTS,
    TRAINING,
    Case,
    Scenario,
    stack,
    teacher_tables,
)
from tests.equivalence.first_update import check_first_update
from tests.equivalence.replay import compare_recorded, held_by, route_shape
from tests.equivalence.truth import Expected, ModelFiles, Truth
from tests.support.configs import model_config
from tests.support.gathered import everywhere, values_of
from tests.support.transformers_reference import worst_error


@dataclass
class Errors:
    """The largest error of each kind, and where it was met."""

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, kind: str, error: float, where: str) -> None:
        if kind not in self.worst or not error <= self.worst[kind][0]:  # a NaN stays
            self.worst[kind] = (math.inf if math.isnan(error) else error, where)

    def add_metrics(
        self, actual: dict[str, float], expected: dict[str, float], where: str, kind: str
    ) -> None:
        """Each relative to its own value; a metric that only one side has is an infinite error."""
        for name in sorted(actual.keys() ^ expected.keys()):
            self.add(kind, math.inf, f"{where}: {name} has no counterpart")
        for name in actual.keys() & expected.keys():
            scale = abs(expected[name]) or 1.0
            reported_kind = "loss" if name == "loss" and kind == "metric" else kind
            self.add(reported_kind, abs(actual[name] - expected[name]) / scale, f"{where}: {name}")

    def merge(self, other: Errors, where: str) -> None:
        for kind, (error, location) in other.worst.items():
            self.add(kind, error, f"{where}, {location}")


def run_case(rank: int, world_size: int, model: ModelFiles, case: Case) -> Errors:
    """The errors of one rank."""
    path = model.path
    truth = model.read(case.scenarios)
    groups = initialize(case.arrangement.layout(), seed=1)
    errors = Errors()
    policy = _build(path, case, groups, truth, distributed_optimizer=False)
    if truth.base_log_probs is not None:
        compare_base(policy, truth, errors)
    for name, cut in case.runs:
        if name == case.scored:
            compare_scores(policy, name, cut, truth.scenarios[name], errors)
        compare_gradients(policy, name, cut, truth.scenarios[name], errors)
    if case.replays:
        for cut in CUTS if case.arrangement.world_size <= 2 else ("packed",):
            compare_recorded(policy, cut, truth.scenarios["gspo"].samples, truth.routers, errors)
    for distributed in case.distributed_optimizers:
        if distributed:
            policy = _build(path, case, groups, truth, distributed_optimizer=True)
        compare_training(
            policy, truth, errors, f"distributed optimizer {'on' if distributed else 'off'}"
        )
    replay = "r2" if case.arrangement.moe else "none"
    check_first_update(policy, truth.scenarios["gspo"].samples, replay=replay)
    return errors


def _build(
    path: str, case: Case, groups: Any, truth: Truth, *, distributed_optimizer: bool
) -> Policy:
    layout = replace(
        case.arrangement.layout(),
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and distributed_optimizer,
        **{name: value for name, value in case.model.items() if name != "recompute"},
    )
    model = model_config(
        path, recompute_granularity=case.model.get("recompute", "none"), implementation="torch"
    )
    parts = TrainedParts(lora=case.lora)
    policy = build_policy(
        model, layout, groups, optimizer=OPTIMIZER, total_steps=OPTIMIZER_STEPS, parts=parts
    )
    if truth.adapters is not None:
        policy.set_adapters(lambda name, sizes: truth.adapters[name])
    return policy


def compare_base(policy: Policy, truth: Truth, errors: Errors) -> None:
    """Log-probs with the adapters off, as of a reference policy."""
    samples = truth.scenarios["gspo"].samples
    scores = compute_log_probs(
        policy.base(), TrainingBatch.of(samples), CUTS["packed"], temperature=1.0
    )
    every = everywhere(scores.log_probs, samples, policy.groups)
    errors.add("base log-prob", _distance(every, truth.base_log_probs), "gspo")


def frozen_weights(policy: Policy) -> list[Tensor]:
    """A copy of what must not change."""
    chunks = (unwrap(chunk) for chunk in policy.chunks)
    return [tensor.detach().clone() for chunk in chunks for _, tensor in held_tensors(chunk)]


def compare_scores(policy: Policy, name: str, cut: str, expected: Expected, errors: Errors) -> None:
    """Log-probs and entropies without a loss, as the old and the reference policy's are
    computed.
    """
    scores = compute_log_probs(
        policy,
        TrainingBatch.of(expected.samples),
        (CUTS | OTHER_CUTS)[cut],
        temperature=ALL[name].temperature,
        with_entropy=True,
    )
    for kind, actual, wanted in (
        ("log-prob", scores.log_probs, expected.batch.log_probs),
        ("entropy", scores.entropy, expected.batch.entropy),
    ):
        every = everywhere(actual, expected.samples, policy.groups)
        errors.add(kind, _distance(every, wanted), f"{name}, {cut}, without a loss")


def _distance(actual: Any, expected: Tensor) -> float:
    return float((stack(actual).double() - expected).abs().max())


def compare_gradients(
    policy: Policy, name: str, cut: str, expected: Expected, errors: Errors
) -> None:
    """Loss, log-probs, metrics and every gradient of the mini-batch."""
    where = f"{name}, {cut}"
    result = run_pass(
        policy, ALL[name], (CUTS | OTHER_CUTS)[cut], expected.samples, expected.columns
    )
    trained = expected.batch.log_probs * (expected.batch.loss_mask > 0)
    errors.add("log-prob", _distance(result.log_probs, trained), where)
    errors.add_metrics(result.metrics, expected.metrics, where, "metric")
    parameter, error = worst_error(result.gradients, expected.gradients)
    errors.add("gradient", error, f"{where}: {parameter}")


@dataclass(frozen=True)
class Pass:
    """A training pass without an optimizer step; ``gradients`` by Hugging Face name, on the CPU."""

    log_probs: list[np.ndarray]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def run_pass(
    policy: Policy,
    scenario: Scenario,
    batching: TrainingConfig,
    samples: list[Sample],
    columns: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Pass:
    """Forward and backward of a mini-batch. columns: further ones of it."""
    options = ReplayOptions(route_shape(policy), replay=True) if scenario.replay else None
    samples = held_by(policy, samples) if scenario.replay else samples
    batch = TrainingBatch.of(samples)
    for name, values in columns.items():
        batch = batch.with_column(name, values)
    optional = [*_carried(samples), *columns]
    batches = pack_mini_batch(policy, batch, batching, optional=optional, routing=options)
    routing = mini_batch_routes(policy, batches, options)
    outputs = forward_backward(
        policy,
        scenario.objective,
        batches,
        temperature=scenario.temperature,
        routing=routing,
        distillation=scenario.distillation,
        teacher=teacher_states(policy, batches) if scenario.all_ids else None,
        score_centering=scenario.score_centering,
    )
    log_probs = values_of(
        [output["log_probs"] for output in outputs], batches, samples, policy.groups
    )
    shares = combined_shares([output["metrics"] for output in outputs])
    [summed] = summed_metrics([shares], policy)
    metrics = finish_metrics(summed)
    gradients = {name: value.clone().cpu() for name, value in exported_gradients(policy)}
    return Pass(log_probs, metrics, gradients)


def teacher_states(policy: Policy, batches: MicroBatches) -> TeacherStates:
    """Those of `teacher_tables`, of this rank's rows of each micro-batch."""
    groups = policy.groups
    if not groups.is_last_stage:
        return TeacherStates((), None)
    table, weight = teacher_tables(policy.shape.vocab_size)
    rank, size = (groups.tp.rank(), groups.tp.size()) if policy.config.sequence_parallel else (0, 1)
    hidden = []
    for packed in batches.batches:
        shard = context_parallel_shard(packed, groups.cp.rank(), groups.cp.size())
        rows = ScoredRows.of(shard.response_mask, rank, size)
        hidden.append(rows.select_own(table[shard.labels.chunk(size)[rank]]))
    count = len(output_weight(policy.chunks[-1]))
    padded = torch.full((count * groups.tp.size(), weight.shape[1]), 7.0)
    padded[: len(weight)] = weight
    of_rank = padded.chunk(groups.tp.size())[groups.tp.rank()]
    return TeacherStates(hidden, of_rank.to(compute_device()))


def exported_gradients(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every gradient, whole, by Hugging Face name; a frozen weight has none."""
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    shape = policy.shape
    groups = policy.groups
    yield from export_weights(
        chunks, policy.family, shape, groups, value=lambda p: getattr(p, "main_grad", None)
    )
    if policy.trained_lora is not None:
        layers = adapter_layers(
            chunks, policy.trained_lora, policy.family, shape, groups, "main_grad"
        )
        yield from export_layers(layers, shape, groups)


def _carried(samples: list[Any]) -> list[str]:
    return [
        name
        for name in OPTIONAL_FIELDS
        if all(getattr(sample, name) is not None for sample in samples)
    ]


def compare_training(policy: Policy, truth: Truth, errors: Errors, where: str) -> None:
    """An optimizer step on each of the mini-batches, then what has become of the weights, or of
    the adapters alone.
    """
    frozen = frozen_weights(policy)
    for index, samples in enumerate(truth.mini_batches):
        result = train_mini_batch(
            policy, TrainingBatch.of(samples), TRAINING.objective, CUTS["packed"], temperature=1.0
        )
        [metrics] = finished_metrics([result], policy)
        errors.add_metrics(
            metrics, truth.training.steps[index], f"{where}, step {index}", "step metric"
        )
    before = truth.training.before
    stream = policy.weights() if policy.trained_lora is None else policy.adapters()
    update = {name: value.double().cpu() - before[name] for name, value in stream}
    if policy.trained_lora is not None:
        changed = sum(
            int((a != b).sum()) for a, b in zip(frozen, frozen_weights(policy), strict=True)
        )
        errors.add("frozen weight", changed, where)
    parameter, error = worst_error(update, truth.training.update)
    errors.add("update", error, f"{where}: {parameter}")
