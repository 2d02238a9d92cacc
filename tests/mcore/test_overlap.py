"""Weights that are gathered during the next forward pass, read before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def policy_with(path: str, overlap: bool) -> Policy:
    layout = parallel(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    return build_policy(model_config(path), layout, groups_of(layout), optimizer=adam(lr=1e-2))


def whole(policy: Policy) -> torch.Tensor:
    """All weights of this rank as they lie in memory."""
    return torch.cat([p.detach().flatten() for p in unwrap(policy.chunks[0]).parameters()])


def step(policy: Policy, seed: int) -> None:
    batch = TrainingBatch.of(make_samples(seed, count=6))
    train_mini_batch(policy, batch, preset("sft"), micro_batches_of(64), temperature=1.0)


def train_and_read(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    """One step without and with overlap, then the weights in memory, in a checkpoint and in the
    stream.
    """
    plain = policy_with(path, False)
    overlapped = policy_with(path, True)
    for policy in (plain, overlapped):
        step(policy, seed=0)
    results: dict[str, Any] = {"stale": float((whole(overlapped) - whole(plain)).abs().max())}
    restored = policy_with(path, False)
    load_checkpoint(restored, save_checkpoint(overlapped, Path(folder), 1, {}, keep=1))
    results["restored"] = torch.equal(whole(restored), whole(plain))
    for policy in (plain, overlapped):
        step(policy, seed=1)
    streamed = {name: weight.clone() for name, weight in overlapped.weights()}
    results["streamed"] = all(
        torch.equal(weight, streamed[name]) for name, weight in plain.weights()
    )
    return results


def test_a_checkpoint_and_the_weight_stream_hold_the_new_weights_of_every_rank(tmp_path):
    path = save_tiny_model(tmp_path / "model", "dense")
    for results in run_distributed(train_and_read, 2, path, str(tmp_path / "checkpoints")):
        assert results["stale"] > 1e-3, "the step leaves nothing to gather: this test shows nothing"
        assert results["restored"] and results["streamed"]
