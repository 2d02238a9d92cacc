"""Adam's step count after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.algorithms import preset
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import train_mini_batch
from megatron_gspo.patches.mark import MARK
from tests.equivalence.cases import make_samples
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.patched_policies import policy_in


def steps_of(policy: Policy) -> list[Tensor]:
    return [state["step"] for state in policy.optimizer.chained_optimizers[0].optimizer.state.values()]


def step(policy: Policy) -> None:
    train_mini_batch(policy, make_samples(count=4), preset("sft"), micro_batches_of(64), temperature=1.0)


def resume_unpatched(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint of one step with the patched methods, and with each of upstream's in its place."""
    policy = policy_in(path, parallel(), distributed_optimizer=True)
    step(policy)
    at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    found: dict[str, Any] = {}
    fresh = policy_in(path, parallel(), distributed_optimizer=True)
    load_checkpoint(fresh, at)
    found["loaded"] = [float(value) for value in steps_of(fresh)]
    step(fresh)
    found["then"] = [float(value) for value in steps_of(fresh)]
    names = ("state_dict", "_set_main_param_and_optimizer_states")
    patched = {name: getattr(DistributedOptimizer, name) for name in names}
    upstream = {name: getattr(function, MARK) for name, function in patched.items()}

    def with_step_given(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        upstream["_set_main_param_and_optimizer_states"](self, model_param, {**tensors, "step": state["step"]})

    DistributedOptimizer.state_dict = upstream["state_dict"]
    with pytest.raises(CheckpointError, match="AssertionError"):
        load_checkpoint(policy_in(path, parallel(), distributed_optimizer=True), at)
    DistributedOptimizer.state_dict = patched["state_dict"]
    DistributedOptimizer._set_main_param_and_optimizer_states = upstream["_set_main_param_and_optimizer_states"]
    with pytest.raises(CheckpointError, match="KeyError: 'step'"):
        load_checkpoint(policy_in(path, parallel(), distributed_optimizer=True), at)
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step_given
    shared = policy_in(path, parallel(), distributed_optimizer=True)
    load_checkpoint(shared, at)
    step(shared)
    found["shared"] = [float(value) for value in steps_of(shared)]
    return found


def test_adam_steps_once_for_each_step_after_a_resume(path, tmp_path):
    found = run_distributed(resume_unpatched, 1, path, str(tmp_path), timeout=60)[0]
    parameters = len(found["loaded"])
    assert found["loaded"] == [1.0] * parameters and found["then"] == [2.0] * parameters
    assert found["shared"] == [1.0 + parameters] * parameters, "upstream gives each its own step: shorten the patch"
