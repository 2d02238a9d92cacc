"""A policy: its optimizer and schedule, the frozen reference, and a gradient that is not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def build(rank: int, world_size: int, path: str) -> dict[str, Any]:
    groups = groups_of(parallel())
    optimizer = adam(1e-2, min_lr=1e-3, lr_decay_style="linear", lr_warmup_steps=1)
    policy = build_policy(
        model_config(path), parallel(), groups, optimizer=optimizer, total_steps=4
    )
    samples = make_samples(count=4)
    cut = micro_batches_of(64)
    rates = [
        train_mini_batch(
            policy, TrainingBatch.of(samples), preset("sft"), cut, temperature=1.0
        ).metrics["lr"]
        for _ in range(5)
    ]
    reference = build_policy(model_config(path), parallel(), groups, optimizer=None)
    random = [
        build_policy(
            model_config(path, init="random"), parallel(), groups_of(parallel()), optimizer=None
        )
        for _ in range(2)
    ]
    weights = [torch.cat([w.flatten() for _, w in each.weights()]) for each in (reference, *random)]
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    return {
        "rates": rates,
        "fused": [group["fused"] for inner in parts for group in inner.optimizer.param_groups],
        "frozen": not any(p.requires_grad for p in reference.chunks[0].parameters()),
        "reference optimizer": reference.optimizer,
        "random": (torch.equal(weights[1], weights[2]), torch.equal(weights[0], weights[1])),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="Adam's kernels are others on a GPU")
def test_a_policy_and_its_reference(tmp_path):
    built = run_distributed(build, 1, save_tiny_model(tmp_path / "model"))[0]
    assert built["rates"] == pytest.approx([5e-3, 1e-2, 7e-3, 4e-3, 1e-3]), (
        "warm-up above 0, then down to min_lr"
    )
    assert built["fused"] and all(built["fused"])
    assert built["frozen"] and built["reference optimizer"] is None
    assert built["random"] == (True, False), "the seed decides on random weights"


def step_on(
    rank: int, world_size: int, path: str, value: float, clip_grad: float
) -> tuple[str, bool]:
    """What a step raises of which the data of the second rank has an advantage ``value``;
    whether the weights moved.
    """
    policy = build_policy(
        model_config(path),
        parallel(),
        groups_of(parallel()),
        optimizer=replace(adam(1e-2), clip_grad=clip_grad),
    )
    before = [parameter.clone() for parameter in policy.chunks[0].parameters()]
    samples = make_samples(count=4)
    for sample in samples:
        sample.old_log_probs = np.full(sample.response_length, -3.0, dtype=np.float32)
    samples[0].advantages = np.full(samples[0].response_length, value, dtype=np.float32)
    message = ""
    try:
        train_mini_batch(
            policy,
            TrainingBatch.of(samples),
            preset("grpo"),
            micro_batches_of(64, micro_batch_size=1),
            temperature=1.0,
        )
    except RuntimeError as error:
        message = str(error)
    return message, not all(map(torch.equal, before, policy.chunks[0].parameters()))


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step(tmp_path, clip_grad):
    """The sample is on one data-parallel rank alone: the other must not wait for it, nor step."""
    path = save_tiny_model(tmp_path / "model")
    assert run_distributed(step_on, 2, path, 1.0, clip_grad) == [("", True)] * 2
    assert (
        run_distributed(step_on, 2, path, float("nan"), clip_grad)
        == [("the grad norm is nan", False)] * 2
    )
