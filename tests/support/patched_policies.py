"""Policies whose gradients are computed with and without a patch."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from megatron_gspo.patches import expert_gradients
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.parallel_groups import groups_of
from tests.support.transformers_reference import worst_error


def policy_in(path: str, layout: ParallelConfig, *, distributed_optimizer: bool = False) -> Policy:
    layout = dataclasses.replace(layout, use_distributed_optimizer=distributed_optimizer)
    return build_policy(model_config(path), layout, groups_of(layout), optimizer=adam(lr=1e-3))


def gradients(policy: Policy) -> dict[str, Tensor]:
    training = micro_batches_of(64, micro_batch_size=2)
    batches = pack_mini_batch(
        policy, TrainingBatch.of(make_samples(count=8)), training, optional=(), routing=None
    )
    forward_backward(policy, preset("sft"), batches, temperature=1.0)
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    stream = export_weights(
        chunks, policy.family, policy.shape, policy.groups, value=lambda p: p.main_grad
    )
    return {name: value.clone() for name, value in stream}


def guarded_and_not(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Gradients with data parallelism alone, and in two layouts that upstream gets wrong,
    without and with our part.
    """
    policy = policy_in(path, parallel())
    truth = gradients(policy)
    interleaved = policy_in(path, parallel(pipeline=2, virtual_pipeline=2))
    settings = interleaved.config.overlap_p2p_comm, interleaved.config.batch_p2p_comm
    with_guard = gradients(interleaved)
    for chunk in interleaved.chunks:
        unwrap(chunk).config.overlap_p2p_comm, unwrap(chunk).config.batch_p2p_comm = False, True
    without_guard = gradients(interleaved)

    layout = parallel(tensor=2)
    tensor = policy_in(path, layout)
    with_patch = gradients(tensor)
    again = expert_gradients.mark_experts(unwrap(tensor.chunks[0]), tensor.config)
    mark_experts = expert_gradients.mark_experts
    expert_gradients.mark_experts = lambda model, config: 0
    try:
        without_patch = gradients(policy_in(path, layout))
        bare = build_model(tensor.shape, layout, model_config(), tensor.groups)[0]
    finally:
        expert_gradients.mark_experts = mark_experts
    changed = mark_experts(bare, bare.config)
    errors = {
        key: worst_error(outcome, truth)
        for key, outcome in [
            ("p2p guarded", with_guard),
            ("p2p unguarded", without_guard),
            ("experts patched", with_patch),
            ("experts unpatched", without_patch),
        ]
    }
    return {"errors": errors, "settings": settings, "changed": changed, "again": again}


MCORE = tuple(int(part) for part in version("megatron-core").split(".")[:2])
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the patch does nothing where CUDA is available"
)
