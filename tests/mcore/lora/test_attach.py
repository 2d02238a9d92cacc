"""Training with adapters alone: what is frozen and saved, the base with adapters off, exact
resume in any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_gspo.algorithms import preset
from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.lora.attach import adapters_of
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.mcore.policy_tensors import gradients
from megatron_gspo.mcore.train_step import compute_log_probs, train_mini_batch
from tests.equivalence.cases import make_samples, max_difference
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

TRAINING = micro_batches_of(64)
ALL_AND_ROUTER = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate",
)
KINDS = {
    "each": LoRAConfig(rank=2, alpha=3.0),
    "shared": LoRAConfig(rank=2, alpha=3.0, experts="shared", targets=ALL_AND_ROUTER),
}


def policy_in(path: str, layout: ParallelConfig, lora: LoRAConfig | None) -> Policy:
    return build_policy(
        model_config(path),
        layout,
        groups_of(layout),
        optimizer=adam(1e-2),
        total_steps=6,
        parts=TrainedParts(lora=lora, seed=1),
    )


def step(policy: Policy, seed: int) -> dict[str, torch.Tensor]:
    batch = TrainingBatch.of(make_samples(seed, count=4))
    train_mini_batch(policy, batch, preset("sft"), TRAINING, temperature=1.0)
    return {name: tensor.clone() for name, tensor in policy.adapters()}


def scores(policy: Policy) -> np.ndarray:
    return compute_log_probs(
        policy, TrainingBatch.of(make_samples(count=4)), TRAINING, temperature=1.0
    ).log_probs


def life(
    rank: int, world_size: int, path: str, other: str, folder: str, kind: str
) -> dict[str, Any]:
    """Two steps with a checkpoint between them; resumed here and in another layout."""
    lora = KINDS[kind]
    layout = parallel(tensor=2, expert_tensor=2)
    base = scores(policy_in(path, layout, None))
    policy = policy_in(path, layout, lora)
    figures: dict[str, Any] = {"unchanged at first": max_error(scores(policy), base)}
    figures["saved"] = step(policy, 0)
    figures["trained"], figures["base"] = (
        max_error(scores(policy), base),
        max_error(scores(policy.base()), base),
    )
    figures["back on"] = all(adapter.enabled for adapter in adapters_of(policy.chunks))
    at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    figures["keys"] = set(FileSystemReader(at).read_metadata().state_dict_metadata)
    trained = sum(
        p.numel() for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad
    )
    figures["trained elements"], figures["buffers"] = (
        trained,
        sum(t.numel() for t in gradients(policy.chunks)),
    )
    figures["next"] = step(policy, 1)
    for name, other_layout in (
        ("same", layout),
        ("pipeline", parallel(pipeline=2)),
        ("experts", parallel(expert=2)),
    ):
        fresh = policy_in(path, other_layout, lora)
        load_checkpoint(fresh, at)
        loaded = {key: tensor.clone() for key, tensor in fresh.adapters()}
        figures[name] = (
            max_difference(loaded, figures["saved"]),
            max_difference(step(fresh, 1), figures["next"]),
        )
    for name, wrong in (
        ("other base", policy_in(other, parallel(tensor=2), lora)),
        ("whole weights", policy_in(path, parallel(tensor=2), None)),
    ):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(wrong, at)
        figures[name] = str(caught.value)
    return figures


def max_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max(initial=0.0))


@pytest.fixture(scope="module", params=list(KINDS))
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    path, other = (
        save_tiny_model(folder / str(seed), num_hidden_layers=2, seed=seed) for seed in (0, 1)
    )
    return run_distributed(life, 2, path, other, str(folder / "checkpoints"), request.param)


def test_the_base_is_there_with_adapters_off(ranks):
    for figures in ranks:
        assert figures["unchanged at first"] == figures["base"] == 0.0 and figures["back on"]
        assert figures["trained"] > 1e-3


def test_checkpoints_hold_adapters_alone(ranks):
    keys = ranks[0]["keys"]
    assert keys and all(".lora." in key for key in keys)
    assert any("optimizer.state.exp_avg." in key for key in keys)


def test_gradients_are_of_adapters_alone(ranks):
    """But for the padding of Megatron's buffers: each tensor to 64 elements, a buffer to 128."""
    for figures in ranks:
        assert (
            0 < figures["trained elements"] <= figures["buffers"] < 4 * figures["trained elements"]
        )


def test_resume_is_exact_here_and_the_same_training_elsewhere(ranks):
    for figures in ranks:
        assert figures["same"] == (0.0, 0.0)
        for name in ("pipeline", "experts"):
            loaded, after = figures[name]
            assert loaded == 0.0 and after < 1e-4, name


def test_other_checkpoints_are_refused(ranks):
    for figures in ranks:
        assert (
            "set model.path back" in figures["other base"] and "checksum" in figures["other base"]
        )
        assert "holds adapters, the run trains whole weights" in figures["whole weights"]
