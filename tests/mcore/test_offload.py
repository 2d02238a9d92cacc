"""A policy's memory released and taken back: the same bits, and none of it left meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.offload import DeviceMemory, PolicyMemory, whole_storages
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import compute_log_probs, finished_metrics, train_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

CUT = micro_batches_of(64)


def test_views_keep_their_bits_and_storages_their_identity() -> None:
    whole = torch.randn(6, 4)
    whole[0, 0], whole[0, 1], whole[0, 2] = float("nan"), float("inf"), -0.0
    view = whole[1:3].t()
    half = torch.randn(7).to(torch.bfloat16)
    expected = [tensor.clone() for tensor in (whole, view, half)]
    memory = DeviceMemory(lambda: (whole, view, half, torch.empty(0)), keeps=True)
    for _ in range(2):
        memory.release()
        memory.release()  # does nothing
        assert memory.released and held((whole, view, half)) == 0
        memory.restore()
        memory.restore()
        assert not memory.released and held((whole, view, half)) == 6 * 4 * 4 + 7 * 2
        for tensor, value in zip((whole, view, half), expected, strict=True):
            assert torch.equal(bits(tensor), bits(value))
    view[0, 0] = 5.0
    assert whole[1, 0] == 5.0


def held(tensors: Any) -> int:
    """Bytes of the storages of some tensors."""
    return sum(whole.numel() for whole in whole_storages(tensors))


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def kinds(memory: PolicyMemory) -> dict[str, int]:
    """Bytes on the device by kind."""
    named = {"weights": memory._weights, "gradients": memory._gradients, "states": memory._states}
    return {name: held(tensors._tensors()) for name, tensors in named.items()}


def state_of(policy: Policy) -> list[Tensor]:
    """Weights and optimizer state of this rank, by value."""
    policy.memory.restore()
    return [
        tensor.detach().clone()
        for tensors in (policy.memory._weights, policy.memory._states)
        for tensor in tensors._tensors()
    ]


def train_both(
    rank: int, world_size: int, path: str, layout: ParallelConfig, dtype: str
) -> dict[str, Any]:
    """Three updates, with all released before each, and without; and what is held in between."""
    model = model_config(path, dtype=dtype)
    runs = {}
    for name in ("plain", "offloaded"):
        policy = build_policy(model, layout, groups_of(layout), optimizer=adam(lr=1e-2))
        before = kinds(policy.memory)
        between = []
        results = []
        for step in range(3):
            if name == "offloaded":
                policy.memory.release()
                between.append(kinds(policy.memory))
                scored = compute_log_probs(
                    policy, TrainingBatch.of(make_samples(step, count=6)), CUT, temperature=1.0
                )
                assert kinds(policy.memory) == {**between[0], "weights": before["weights"]}
                policy.memory.release()
            else:
                scored = compute_log_probs(
                    policy, TrainingBatch.of(make_samples(step, count=6)), CUT, temperature=1.0
                )
            results.append(scored.log_probs)
            batch = TrainingBatch.of(make_samples(step, count=6))
            done = train_mini_batch(policy, batch, preset("sft"), CUT, temperature=1.0)
            results += [finished_metrics([done], policy), done.log_probs]
        if name == "offloaded":
            policy.memory.release()
        streamed = {key: weight.clone() for key, weight in policy.weights()}
        runs[name] = {
            "results": results,
            "state": state_of(policy),
            "before": before,
            "between": between,
            "after": kinds(policy.memory),
            "streamed": streamed,
        }
    return runs


LAYOUTS = {
    "float32, expert parallel": (parallel(expert=2), "float32"),
    "bfloat16, expert parallel": (parallel(expert=2), "bfloat16"),
    "bfloat16, interleaved pipeline": (
        parallel(pipeline=2, virtual_pipeline_model_parallel_size=2),
        "bfloat16",
    ),
    "bfloat16, gathered in the next pass": (
        parallel(overlap_grad_reduce=True, overlap_param_gather=True),
        "bfloat16",
    ),
    "bfloat16, whole optimizer on every rank": (
        parallel(use_distributed_optimizer=False),
        "bfloat16",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same_bits_and_nothing_is_held_in_between(model: str, layout: str) -> None:
    for runs in run_distributed(train_both, 2, model, *LAYOUTS[layout]):
        plain = runs["plain"]
        offloaded = runs["offloaded"]
        for expected, result in zip(plain["results"], offloaded["results"], strict=True):
            np.testing.assert_equal(expected, result)
        assert len(plain["state"]) == len(offloaded["state"]) > 10
        assert all(
            torch.equal(bits(a), bits(b))
            for a, b in zip(plain["state"], offloaded["state"], strict=True)
        )
        assert plain["streamed"].keys() == offloaded["streamed"].keys()
        assert all(
            torch.equal(weight, offloaded["streamed"][name])
            for name, weight in plain["streamed"].items()
        )
        assert all(sum(held_then.values()) == 0 for held_then in offloaded["between"])
        assert (
            offloaded["after"] == plain["after"]
            and offloaded["before"]["weights"] == plain["after"]["weights"] > 0
        )
        assert plain["after"]["states"] > offloaded["before"]["states"], (
            "Adam's moments come with the first update"
        )


def save_while_released(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    layout = parallel()
    policies = [
        build_policy(model_config(path), layout, groups_of(layout), optimizer=adam(lr=1e-2))
        for _ in "ab"
    ]
    train_mini_batch(
        policies[0], TrainingBatch.of(make_samples(count=6)), preset("sft"), CUT, temperature=1.0
    )
    expected = state_of(policies[0])
    calls = []
    for policy in policies:
        policy.memory.release()
        policy.memory.make_room = lambda: calls.append("room")
    policies[0].memory.release(keep_weights=True)
    load_checkpoint(policies[1], save_checkpoint(policies[0], Path(folder), 1, {}, keep=1))
    same = [torch.equal(a, b) for a, b in zip(expected, state_of(policies[1]), strict=True)]
    policies[0].memory.release()
    policies[0].memory.restore_weights()  # the engine's memory is not needed for a pass
    frozen = build_policy(model_config(path), layout, groups_of(layout), optimizer=None)
    frozen.memory.release()
    return {"same": all(same), "calls": calls, "frozen": kinds(frozen.memory)}


def test_a_checkpoint_takes_everything_back_first(model: str, tmp_path: Path) -> None:
    [outcome] = run_distributed(save_while_released, 1, model, str(tmp_path / "checkpoints"))
    assert outcome == {
        "same": True,
        "calls": ["room"] * 2,
        "frozen": {"weights": 0, "gradients": 0, "states": 0},
    }
