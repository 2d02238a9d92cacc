"""The two passes over a rollout batch: what they return on every rank, and what they leave
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_gspo.algorithms import Objective, preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore import forward_step
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import (
    combined_shares,
    compute_log_probs,
    forward_backward,
    optimizer_step,
    pack_mini_batch,
    summed_metrics,
    train_mini_batch,
)
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import everywhere
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

LAYOUTS = {"data": parallel(), "pipeline": parallel(pipeline=2)}
CUT = replace(micro_batches_of(40), log_prob_memory_gib=2**-20)
GRPO = preset("grpo")


class Clock:
    """A clock as Megatron's schedule calls it; records each start and stop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, name: str, **_: Any) -> Any:
        clock = self

        class Timer:
            def start(self, **_: Any) -> None:
                clock.calls.append((name, "start"))

            def stop(self, **_: Any) -> None:
                clock.calls.append((name, "stop"))

        return Timer()


def policy_of(path: str, layout: ParallelConfig) -> Policy:
    optimizer = adam(1e-2, min_lr=1e-3, lr_decay_style="linear")
    return build_policy(
        model_config(path), layout, groups_of(layout), optimizer=optimizer, total_steps=4
    )


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat(
        [p.main_grad.flatten() for chunk in policy.chunks for p in chunk.parameters()]
    ).clone()


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([weight.flatten() for _, weight in policy.weights()]).clone()


def backward(policy: Policy, samples: list[Sample], objective: Objective) -> torch.Tensor:
    batches = pack_mini_batch(
        policy, TrainingBatch.of(samples), CUT, optional=["old_log_probs"], routing=None
    )
    forward_backward(policy, objective, batches, temperature=1.0)
    return gradients(policy)


def both_passes(rank: int, world_size: int, path: str, layout: ParallelConfig) -> dict[str, Any]:
    policy = policy_of(path, layout)
    samples = make_samples(count=6)
    weights_before, gradients_before = weights(policy), gradients(policy)
    with head_budgets() as scoring_budgets:
        scored = compute_log_probs(policy, TrainingBatch.of(samples), CUT, temperature=1.0)
    observed: dict[str, Any] = {
        "unasked": [scored.entropy, scored.routing],
        "unchanged": (
            torch.equal(weights_before, weights(policy))
            and torch.equal(gradients_before, gradients(policy))
        ),
        # on a pipeline only the last stage would fail, and the first wait for it
        "refused": missing_old_log_probs(policy, samples) if policy.groups.pp.size() == 1 else None,
    }
    log_probs = everywhere(scored.log_probs, samples, policy.groups)
    for sample, value in zip(samples, log_probs, strict=True):
        sample.old_log_probs = value

    observed["gradients"] = [backward(policy, samples, GRPO) for _ in range(2)]
    policy.config.timers = Clock()
    with head_budgets() as training_budgets:
        trained = train_mini_batch(policy, TrainingBatch.of(samples), GRPO, CUT, temperature=1.0)
    observed["budgets"] = [set(scoring_budgets), set(training_budgets)]
    observed["last stage"] = policy.groups.is_last_stage
    observed["calls"] = policy.config.timers.calls
    observed["unasked"].append(trained.routing)
    observed["carried"] = [
        (batch.old_log_probs is not None, batch.ref_log_probs is not None)
        for batch in trained.batches.batches
    ]
    observed["moved"] = not torch.equal(weights_before, weights(policy))
    own_shares = combined_shares(shares(rank) if policy.groups.is_last_stage else [])
    [observed["summed"]] = summed_metrics([own_shares], policy)
    return observed


def missing_old_log_probs(policy: Policy, samples: list[Sample]) -> str:
    """The message for samples of which one lacks what the objective needs."""
    for sample in samples[1:]:
        sample.old_log_probs = np.zeros(sample.length - sample.prompt_length, dtype=np.float32)
    try:
        train_mini_batch(policy, TrainingBatch.of(samples), GRPO, CUT, temperature=1.0)
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def head_budgets() -> Iterator[list[int | None]]:
    """The bytes that each call of the head may take for tiles."""
    budgets: list[int | None] = []
    head = forward_step.log_probs_from_hidden

    def watched(hidden: Any, weight: Any, labels: Any, options: Any, **kwargs: Any) -> Any:
        budgets.append(options.chunk_bytes)
        return head(hidden, weight, labels, options, **kwargs)

    with mock.patch.object(forward_step, "log_probs_from_hidden", watched):
        yield budgets


def shares(rank: int) -> list[dict[str, torch.Tensor]]:
    values = (
        {"a": 1 + rank, "ratio_max": 2 - rank, "ratio_min": rank},
        {"a": 10, "ratio_max": -1, "ratio_min": 5, "d": 7},
    )
    return [
        {name: torch.tensor(float(value)) for name, value in shared.items()} for shared in values
    ]


def in_every_layout(rank: int, world_size: int, path: str) -> dict[str, dict[str, Any]]:
    return {name: both_passes(rank, world_size, path, layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, Any]]]]:
    yield run_distributed(
        in_every_layout, 2, save_tiny_model(tmp_path_factory.mktemp("models") / "model")
    )


def each(ranks: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for rank, layouts in enumerate(ranks):
        for name, observed in layouts.items():
            yield f"{name}, rank {rank}", observed


def test_entropy_and_routes_are_returned_on_request_only(ranks):
    for name, observed in each(ranks):
        assert observed["unasked"] == [None, None, None], name


def test_log_probs_leave_weights_and_gradients_unchanged_and_a_step_does_not(ranks):
    for name, observed in each(ranks):
        assert observed["unchanged"] and observed["moved"], name


def test_both_passes_give_the_head_the_memory_of_the_config(ranks):
    for name, observed in each(ranks):
        expected = {1024} if observed["last stage"] else set()
        assert observed["budgets"] == [expected, expected], name


def test_a_step_starts_from_zero_gradients(ranks):
    for name, observed in each(ranks):
        first, second = observed["gradients"]
        assert first.any() and torch.equal(first, second), name


def test_a_field_that_one_sample_lacks_is_not_carried(ranks):
    for name, observed in each(ranks):
        assert set(observed["carried"]) == {(True, False)}, name


def test_an_objective_with_a_ratio_needs_old_log_probs_of_every_sample(ranks):
    for layouts in ranks:
        assert "old_log_probs" in layouts["data"]["refused"]


def test_the_optimizer_is_timed_by_the_clock_of_the_config(ranks):
    for name, observed in each(ranks):
        for call in ("start", "stop"):
            assert observed["calls"].count(("optimizer", call)) == 1, name


def test_the_clock_stops_when_the_optimizer_fails():
    def fail() -> None:
        raise OSError("no memory")

    clock = Clock()
    policy = SimpleNamespace(
        config=SimpleNamespace(timers=clock),
        optimizer=SimpleNamespace(step=fail),
        scheduler=SimpleNamespace(),
    )
    with pytest.raises(OSError, match="no memory"):
        optimizer_step(policy)
    assert clock.calls == [("optimizer", "start"), ("optimizer", "stop")]


def test_shares_add_up_and_extremes_stay_extremes(ranks):
    """Over micro-batches and data-parallel ranks; a micro-batch may lack a metric. Every
    pipeline stage has the sum.
    """
    over_both_ranks = {"a": 23.0, "ratio_max": 2.0, "ratio_min": 0.0, "d": 14.0}
    of_the_last_rank = {"a": 12.0, "ratio_max": 1.0, "ratio_min": 1.0, "d": 7.0}
    for layouts in ranks:
        assert layouts["data"]["summed"] == over_both_ranks
        assert layouts["pipeline"]["summed"] == of_the_last_rank
