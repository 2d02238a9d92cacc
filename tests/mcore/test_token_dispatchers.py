"""Our dispatchers give Megatron's results, with the rows of the last expert first, as its weights
are in Megatron's parameter buffer; and a token goes to each rank once.
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


def with_a_probability_of_zero(
    router: Any, inputs: Any, outputs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """That of the first token's first expert, which the token still goes to."""
    probs, routing_map = outputs
    others = torch.ones_like(probs)
    others[0, routing_map[0].nonzero()[0]] = 0.0
    return probs * others, routing_map


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
    maps: list[Tensor] = []
    layer.router.register_forward_hook(with_a_probability_of_zero)
    layer.router.register_forward_hook(lambda *call: maps.append(call[-1][1]))
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
    dispatcher = layer.token_dispatcher
    to_ranks = maps[0].view(len(maps[0]), dispatcher.ep_size, -1).any(2)
    observed["sent"] = [] if dispatcher.input_splits is None else dispatcher.input_splits.tolist()
    observed["ranks of tokens"] = to_ranks.sum(0).tolist()
    layer.token_dispatcher.last_first = False
    observed["first to last"] = run_layer(policy, rank)
    # Megatron's own cuts what it receives into chunks, and joins them.
    layer.token_dispatcher.__class__ = MoEAlltoAllTokenDispatcher
    return observed | {"Megatron's": run_layer(policy, rank)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", "moe")


def is_near(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_megatrons_and_weights_are_one_view(name, path):
    ranks, layout = LAYOUTS[name]
    for observed in run_distributed(every_order, ranks, path, layout):
        assert observed["last_first"] and observed["experts"] > 1
        assert observed["is_view"] and observed["values"]
        ours = observed["last to first"]
        assert all(map(torch.equal, ours, observed["first to last"]))
        # A token's experts are added up rank by rank.
        is_same = torch.equal if name == "alone" else is_near
        assert all(map(is_same, ours, observed["Megatron's"]))
        assert ours[1].any()
        if name != "alone":
            assert observed["sent"] == observed["ranks of tokens"]
