"""A rank whose distributed optimizer holds no parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

STAGES = parallel(pipeline=2, expert=2)


def policy_at(path: str) -> Policy:
    return build_policy(model_config(path), STAGES, groups_of(STAGES), optimizer=adam(lr=1e-2))


def step(policy: Policy, seed: int) -> None:
    train_mini_batch(
        policy,
        TrainingBatch.of(make_samples(seed, count=4)),
        preset("sft"),
        micro_batches_of(64),
        temperature=1.0,
    )


def resume(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    """One step, a checkpoint, another step; the same from the checkpoint."""
    through = policy_at(path)
    step(through, 1)
    optimizers = [optimizer.optimizer for optimizer in through.optimizer.chained_optimizers]
    outcome: dict[str, Any] = {
        "parameters": [
            sum(len(g["params"]) for g in optimizer.param_groups) for optimizer in optimizers
        ]
    }
    at = save_checkpoint(through, Path(folder), 1, {}, keep=1)
    step(through, 2)
    resumed = policy_at(path)
    load_checkpoint(resumed, at)
    step(resumed, 2)
    expected = {name: weight.clone() for name, weight in through.weights()}
    outcome["equal"] = all(
        torch.equal(weight, expected[name]) for name, weight in resumed.weights()
    )
    return outcome


def test_a_stage_without_experts_is_saved_and_resumed(tmp_path):
    # The first stage has dense layers only.
    path = save_tiny_model(tmp_path / "model", mlp_only_layers=[0, 1])
    ranks = run_distributed(resume, 4, path, str(tmp_path / "checkpoints"))
    for rank, outcome in enumerate(ranks):
        assert outcome["equal"]
        assert (outcome["parameters"][1] == 0) == (rank < 2)
