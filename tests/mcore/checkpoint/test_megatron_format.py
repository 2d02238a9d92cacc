"""Checkpoints that Megatron wrote, as this program did before, are loaded; Megatron loads ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    begin_checkpoint,
    checkpoint_path,
    publish_checkpoint,
)
from megatron_gspo.mcore.checkpoint.owned_state import optimizer_numbers
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples, max_difference
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.saved_policies import LR, policy_in

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.weights()}


def train_step(policy: Policy, seed: int) -> dict[str, Tensor]:
    batch = TrainingBatch.of(make_samples(seed, count=4))
    train_mini_batch(policy, batch, preset("sft"), micro_batches_of(64), temperature=1.0)
    return weights(policy)


def save_as_before(policy: Policy, folder: Path) -> Path:
    """With Megatron, the optimizer gathered; the step counts beside it."""
    models = {
        f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(policy.chunks)
    }
    optimizer = policy.optimizer.sharded_state_dict(
        models["model0"], is_loading=False, metadata=FORMAT
    )
    stored = (ShardedBase, LocalNonpersistentObject)
    moments, _ = extract_matching_values(optimizer, lambda value: isinstance(value, stored))
    steps = {
        "optimizer_step": optimizer_numbers(policy)["step"],
        "schedule_step": policy.scheduler.num_steps,
    }
    path = checkpoint_path(folder, 1)
    if torch.distributed.get_rank() == 0:
        partial = begin_checkpoint(folder, 1)
        publish_checkpoint(partial, path, {"step": 1}, keep=1)
        content = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({"state": content["state"], "files": {}}))
    torch.distributed.barrier()
    dist_checkpointing.save({**models, "optimizer": moments, **steps}, str(path))
    return path


def exchange(
    rank: int,
    world_size: int,
    path: str,
    folder: str,
    layout: ParallelConfig,
    sharded: bool,
    others: list[tuple[ParallelConfig, bool]],
) -> dict[str, Any]:
    """A checkpoint as before, and what follows: without interruption, and loaded in each of the
    other layouts.
    """
    policy = policy_in(path, layout, distributed_optimizer=sharded)
    saved = train_step(policy, 0)
    at = save_as_before(policy, Path(folder) / "old")
    later = train_step(policy, 1)
    outcomes = {}
    for number, (other, also) in enumerate([(layout, sharded), *others]):
        resumed = policy_in(path, other, distributed_optimizer=also)
        state = load_checkpoint(resumed, at)
        assert state == {"step": 1} and optimizer_numbers(resumed) == {"step": 1}
        outcomes[number] = (
            max_difference(weights(resumed), saved),
            max_difference(train_step(resumed, 1), later),
        )
    return outcomes


CASES = {
    "sharded": (
        parallel(tensor=2),
        True,
        [(parallel(pipeline=2), True), (parallel(), True), (parallel(), False)],
    ),
    "whole": (parallel(tensor=2), False, [(parallel(), False), (parallel(), True)]),
}


@pytest.mark.parametrize("case", CASES)
def test_earlier_checkpoints_are_loaded(path, tmp_path, case):
    """In their layout exactly, in others up to the order of float32 sums."""
    for outcomes in run_distributed(exchange, 2, path, str(tmp_path), *CASES[case]):
        assert outcomes[0] == (0, 0)
        assert all(same == 0 and next_ < LR / 2 for same, next_ in outcomes.values())


def load_with_megatron(rank: int, world_size: int, path: str, folder: str) -> tuple[float, float]:
    """Ours, into another layout: the weights, and moments of the first weights' norm."""
    policy = policy_in(path, parallel())
    saved = train_step(policy, 0)
    at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    other = policy_in(path, parallel(tensor=2))
    train_step(other, 3)
    model = unwrap(other.chunks[0]).sharded_state_dict()
    optimizer = other.optimizer.sharded_state_dict(model, is_loading=True, metadata=FORMAT)
    moments, _ = extract_matching_values(optimizer, lambda value: isinstance(value, ShardedBase))
    loaded = dist_checkpointing.load({"model": model, "optimizer": moments}, str(at))
    unwrap(other.chunks[0]).load_state_dict(loaded["model"])
    theirs = sum(
        float(value.double().square().sum()) for value in tensors(loaded["optimizer"], "exp_avg")
    )
    ours = policy_in(path, parallel(tensor=2))
    load_checkpoint(ours, at)
    model = unwrap(ours.chunks[0]).sharded_state_dict()
    gathered = ours.optimizer.sharded_state_dict(model, is_loading=False, metadata=FORMAT)
    expected = sum(
        float(value.data.double().square().sum()) for value in tensors(gathered, "exp_avg")
    )
    return max_difference(weights(other), saved), abs(theirs / expected - 1)


def tensors(value: Any, name: str) -> list[Any]:
    """What a nested dict has under a key."""
    if not isinstance(value, dict):
        return []
    values = [value[name]] if name in value else []
    return values + [item for inner in value.values() for item in tensors(inner, name)]


def test_megatron_loads_ours(path, tmp_path):
    for weights_differ, moments_differ in run_distributed(
        load_with_megatron, 2, path, str(tmp_path)
    ):
        assert weights_differ == 0 and moments_differ < 1e-12
