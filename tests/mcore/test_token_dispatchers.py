"""Our dispatchers give the same bits as Megatron's, with the rows of the last expert first, as its
weights are in Megatron's parameter buffer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.expert_products import stacked
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.patched_policies import policy_in
from tests.support.tiny_models import save_tiny_model

LAYOUTS = {
    "alone": (1, parallel()),
    "experts": (2, parallel(expert=2)),
    "experts, tensor": (2, parallel(tensor=2, expert=2)),
    "expert tensor": (2, parallel(tensor=2, expert_tensor=2)),
}


def expert_layer(policy: Policy) -> Any:
    return unwrap(policy.chunks[0]).decoder.layers[0].mlp


def run_layer(policy: Policy, rank: int) -> list[Tensor]:
    """Output, and the gradients of the input and of every weight."""
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    layer = expert_layer(policy)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12, 1, policy.config.hidden_size, generator=generator).requires_grad_()
    output, _ = layer(x)
    output.square().sum().backward()
    gradients = [parameter.main_grad.clone() for parameter in layer.parameters()]
    return [output.detach(), x.grad, *gradients]


def every_order(rank: int, world_size: int, path: str, layout: ParallelConfig) -> dict[str, Any]:
    policy = policy_in(path, layout, distributed_optimizer=True)
    layer = expert_layer(policy)
    weights = [
        expert.linear_fc1.weight.detach() for expert in reversed(layer.experts.local_experts)
    ]
    joined = stacked(weights)
    observed = {
        "last_first": layer.token_dispatcher.last_first,
        "experts": len(weights),
        "is_view": joined.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr(),
        "values": torch.equal(joined, torch.stack(weights)),
        "last to first": run_layer(policy, rank),
    }
    layer.token_dispatcher.last_first = False
    observed["first to last"] = run_layer(policy, rank)
    # Megatron's own cuts what it receives into chunks, and joins them.
    layer.token_dispatcher.__class__ = MoEAlltoAllTokenDispatcher
    return observed | {"Megatron's": run_layer(policy, rank)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", "moe")


@pytest.mark.parametrize("ranks, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_bit_differs_from_megatrons_and_weights_are_one_view(ranks, layout, path):
    for observed in run_distributed(every_order, ranks, path, layout):
        assert observed["last_first"] and observed["experts"] > 1
        assert observed["is_view"] and observed["values"]
        for other in ("first to last", "Megatron's"):
            pairs = zip(observed["last to first"], observed[other], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), other
        assert observed["last to first"][1].any()
