"""The routers' bias: float32, part of the weights, in the choice of experts and not in their
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.routing_cases import (
    policy_of,
    routers,
    run_pass,
    scored_samples,
    shape_of,
    with_random_routes,
)
from tests.support.tiny_models import save_tiny_model

NAME = "mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "deepseek", dtype=torch.bfloat16)


def biases(path: str) -> dict[str, Tensor]:
    with CheckpointReader(path) as reader:
        return {name: reader.read(name) for name in sorted(reader.names) if name.endswith(NAME)}


def train_and_send(
    rank: int, world_size: int, path: str, folder: str, layout: Any
) -> dict[str, Any]:
    """What is sent after a step of training in bfloat16, and after a checkpoint of it was
    loaded.
    """
    policy = policy_of(path, layout, dtype="bfloat16")
    before = {name: value.clone() for name, value in policy.weights()}
    run_pass(policy, scored_samples(), ReplayOptions(shape_of(policy)))
    policy.optimizer.step()
    after = {name: value.clone() for name, value in policy.weights()}
    saved = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    for router in routers(policy):
        router.expert_bias.zero_()
    load_checkpoint(policy, saved)
    again = {name: value.clone() for name, value in policy.weights()}
    moved = sum(
        not torch.equal(before[name], after[name]) for name in before if not name.endswith(NAME)
    )
    return {
        "sent": [
            {name: sent[name] for name in sent if name.endswith(NAME)}
            for sent in (before, after, again)
        ],
        "moved": moved / (len(before) - 3),
    }


@pytest.mark.parametrize(
    "layout", [parallel(), parallel(pipeline=2), parallel(tensor=2, expert=2)], ids=str
)
def test_it_is_frozen_and_keeps_its_bits_in_training_checkpoints_and_streams(
    layout, path, tmp_path
):
    expected = biases(path)
    assert len(expected) == 3 and {value.dtype for value in expected.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    world = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    for figures in run_distributed(train_and_send, world, path, str(tmp_path), layout):
        assert figures["moved"] > 0.5
        for sent in figures["sent"]:
            assert set(sent) == set(expected)
            for name, value in expected.items():
                assert sent[name].dtype is torch.float32 and torch.equal(sent[name], value), name


RATE = 0.25


def updated(
    rank: int, world_size: int, path: str, layout: Any, replay: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Bias before and after a mini-batch with an update rate, and tokens of each expert on this
    rank. Replayed routes are among the first six experts."""
    policy = policy_of(path, layout, expert_bias_update_rate=RATE)
    counts: dict[int, Tensor] = {}
    before = [router.expert_bias.clone() for router in routers(policy)]

    def count(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            counts[number] = counts.get(number, 0) + output[1].sum(0)

        return hook

    for number, router in enumerate(routers(policy)):
        router.register_forward_hook(count(number))
    samples = scored_samples(8)
    shape = shape_of(policy)
    data = policy.groups.dp
    samples = with_random_routes(samples, shape, among=6) if replay else samples
    run_pass(policy, samples[data.rank() :: data.size()], ReplayOptions(shape, replay=replay))
    return [(before[i], router.expert_bias, counts[i]) for i, router in enumerate(routers(policy))]


def towards_even(load: Tensor) -> Tensor:
    """How a bias moves by tokens of each expert."""
    mean = load.double().mean()
    return torch.tensor([RATE * ((mean > n).double() - (mean < n).double()) for n in load.double()])


@pytest.mark.parametrize("replay", [False, True], ids=["live", "replayed"])
@pytest.mark.parametrize(
    "world, layout",
    [(1, parallel()), (2, parallel()), (2, parallel(tensor=2, expert=2))],
    ids=["one rank", "data 2", "tensor 2, expert 2"],
)
def test_an_update_rate_moves_it_towards_an_even_load(world, layout, replay, path):
    """Of all ranks together: each has its own tokens."""
    ranks = run_distributed(updated, world, path, layout, replay)
    alone = 0
    for of_layer in zip(*ranks, strict=True):  # of a layer
        step = towards_even(sum(load for _, _, load in of_layer))
        for before, after, load in of_layer:
            assert torch.allclose(after.double() - before.double(), step, atol=1e-6)
            assert torch.equal(after, of_layer[0][1])
            alone += not torch.equal(step, towards_even(load))
        assert step.abs().sum() > 1
        if replay:
            assert torch.equal(step, torch.tensor([-RATE] * 6 + [RATE] * 6))
    assert replay or (alone > 0) == (world > 1), (
        "the load of one rank alone would move it elsewhere"
    )
