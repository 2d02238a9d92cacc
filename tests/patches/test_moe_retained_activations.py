"""Memory that MoE dispatchers keep after the backward pass of recomputed layers, on real
tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from megatron_gspo.patches import moe_retained_activations
from megatron_gspo.patches.mark import MARK
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

LAYERS = (2, 4)
LAYOUTS = {
    "alltoall": parallel(),
    "allgather": parallel(moe_token_dispatcher_type="allgather"),
    # Here combine_preprocess reads the dtype of the probabilities.
    "expert tensor": parallel(tensor=2, expert_tensor=2),
}
UPSTREAM = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}


def retained_bytes(path: str, layout: ParallelConfig) -> tuple[int, int]:
    """What a forward and backward pass with upstream's dispatchers leaves allocated, and one
    residual stream.
    """
    policy = build_policy(
        model_config(path, recompute_granularity="full"),
        layout,
        groups_of(layout),
        optimizer=adam(lr=1e-3),
    )
    for layer in unwrap(policy.chunks[0]).decoder.layers:
        layer.mlp.token_dispatcher.__class__ = getattr(
            token_dispatcher, UPSTREAM[layout.moe_token_dispatcher_type]
        )
    batch = TrainingBatch.of(make_samples(count=4))
    batches = pack_mini_batch(policy, batch, micro_batches_of(400), optional=(), routing=None)
    with LiveStorages() as storages:
        forward_backward(policy, preset("sft"), batches, temperature=1.0)
    tokens = batches.batches[0].tokens.shape[0] // layout.tensor_model_parallel_size
    return sum(size for size, _ in storages.alive()), tokens * policy.shape.hidden_size * 4


def by_layers(rank: int, world_size: int, paths: dict[int, str], name: str) -> dict[str, Any]:
    """Retained bytes at each depth, with the patch and with upstream's code."""
    retained: dict[str, Any] = {
        "patched": {n: retained_bytes(path, LAYOUTS[name]) for n, path in paths.items()}
    }
    for dispatcher in (
        getattr(token_dispatcher, name) for name in moe_retained_activations.DISPATCHERS
    ):
        dispatcher.combine_postprocess = getattr(dispatcher.combine_postprocess, MARK)
    retained["upstream"] = {n: retained_bytes(path, LAYOUTS[name]) for n, path in paths.items()}
    return retained


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("models")
    return {n: save_tiny_model(folder / str(n), num_hidden_layers=n) for n in LAYERS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_recomputed_layer_keeps_its_input_and_gradient(paths, name):
    retained = run_distributed(by_layers, LAYOUTS[name].tensor_model_parallel_size, paths, name)[0]
    (few, residual), (many, _) = (retained["patched"][n] for n in LAYERS)
    assert many - few < 0.1 * residual
    (few, _), (many, _) = (retained["upstream"][n] for n in LAYERS)
    added = LAYERS[1] - LAYERS[0]
    assert many - few >= added * 2 * residual, "upstream releases them: delete the patch"


def test_a_communication_manager_is_released_too():
    manager = SimpleNamespace(token_probs=torch.ones(2), token_indices=torch.ones(2), num_experts=8)
    flex = SimpleNamespace(_comm_manager=manager, hidden_shape=(2, 1, 4))
    moe_retained_activations.release(flex)
    assert vars(manager) == {"token_probs": None, "token_indices": None, "num_experts": 8}
    assert vars(flex) == {"_comm_manager": manager, "hidden_shape": (2, 1, 4)}


@pytest.mark.parametrize("name", moe_retained_activations.DISPATCHERS)
def test_every_dispatcher_is_patched(name):
    assert hasattr(getattr(token_dispatcher, name).combine_postprocess, MARK)
