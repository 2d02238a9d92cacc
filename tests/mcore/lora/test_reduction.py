"""Adapters that several ranks hold: marked, summed over their group, and counted once in the
gradient norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.config import LoRAConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import TrainedParts, build_policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def marks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Of the first expert's adapters: group size, whether it counts in the norm, and the
    gradient.
    """
    marked = {}
    for name, sizes, experts in (
        ("etp", dict(expert_tensor=2), "each"),
        ("ep", dict(expert=2), "each"),
        ("shared", dict(expert=2), "shared"),
    ):
        layout = parallel(use_distributed_optimizer=False, **sizes)
        lora = LoRAConfig(rank=2, experts=experts)
        policy = build_policy(
            model_config(path),
            layout,
            groups_of(layout),
            optimizer=adam(1e-3),
            parts=TrainedParts(lora=lora),
        )
        batches = pack_mini_batch(
            policy,
            TrainingBatch.of(make_samples(count=4)),
            micro_batches_of(64),
            optional=(),
            routing=None,
        )
        forward_backward(policy, preset("sft"), batches, temperature=1.0)
        expert = unwrap(policy.chunks[0]).decoder.layers[0].mlp.experts.local_experts[0]
        for key in (
            "linear_fc1.lora.lora_A",
            "linear_fc1.lora.lora_B",
            "linear_fc2.lora.lora_A",
            "linear_fc2.lora.lora_B",
        ):
            p: Any = expert.get_parameter(key)
            group = getattr(p, "summed_over", None)
            marked[name, key] = (
                group.size() if group else 1,
                p.tensor_model_parallel,
                p.main_grad.clone(),
            )
        chunk = unwrap(policy.chunks[0])
        marked[name] = {
            key
            for key, p in chunk.named_parameters()
            if p.grad is not None or hasattr(p, "main_grad")
        }
    return marked


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    return run_distributed(
        marks, 2, save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    )


def test_groups_and_norms(ranks):
    first, second = ranks
    sizes = {key: first[key][0] for key in first if isinstance(key, tuple)}
    replicated = {("etp", "linear_fc1.lora.lora_A"), ("etp", "linear_fc2.lora.lora_B")}
    replicated |= {key for key in sizes if key[0] == "shared"}
    assert {key for key, size in sizes.items() if size == 2} == replicated
    assert all(first[key][1] and second[key][1] == (key not in replicated) for key in sizes)


def test_replicas_have_one_gradient(ranks):
    first, second = ranks
    for key in (("shared", "linear_fc1.lora.lora_B"), ("etp", "linear_fc2.lora.lora_B")):
        assert first[key][2].any() and torch.equal(first[key][2], second[key][2]), key
    assert not torch.equal(
        first["ep", "linear_fc2.lora.lora_B"][2], second["ep", "linear_fc2.lora.lora_B"][2]
    )


def test_nothing_else_has_a_gradient(ranks):
    for marked in ranks:
        for name in ("etp", "ep", "shared"):
            assert marked[name] and all(".lora." in key for key in marked[name]), name
