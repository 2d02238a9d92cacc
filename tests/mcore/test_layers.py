"""The torch layers: experts that equal Megatron's own."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.mcore.layers import (
    FusedSequentialMLP,
    MoELocalTokenDispatcher,
    MoEStaticTokenDispatcher,
)
from megatron_gspo.mcore.model import build_model
from tests.mcore.test_model import shape_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of

LAYOUTS = {
    "one": (parallel(), MoELocalTokenDispatcher, "moe"),
    "expert": (parallel(expert=2), MoEStaticTokenDispatcher, "moe"),
    "expert tensor": (parallel(tensor=2, expert_tensor=2), MoEStaticTokenDispatcher, "moe"),
    # Megatron refuses these under expert-tensor parallelism.
    "biases": (parallel(expert=2), MoEStaticTokenDispatcher, "gpt_oss"),
}


def experts_both_ways(rank: int, world_size: int, name: str) -> dict[str, float]:
    """Outputs and gradients of one MoE layer with our experts and dispatcher, with our dispatcher
    alone, as under Transformer Engine, and with Megatron's."""
    layout, dispatcher, kind = LAYOUTS[name]
    [chunk] = build_model(shape_of(kind), layout, model_config(), groups_of(layout))
    layer = chunk.decoder.layers[0].mlp
    assert type(layer.experts) is FusedSequentialMLP and type(layer.token_dispatcher) is dispatcher
    for parameter in layer.parameters():
        if parameter.dim() == 1:  # biases, which are zero
            parameter.data.uniform_(-0.5, 0.5)
    x = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(1 + rank))
    found = []
    for experts, of_tokens in (
        (FusedSequentialMLP, dispatcher),
        (SequentialMLP, dispatcher),
        (SequentialMLP, MoEAlltoAllTokenDispatcher),
    ):
        if experts is SequentialMLP and kind == "gpt_oss":  # Megatron's is compiled
            layer.experts.config.activation_func = lambda gate: gate * torch.sigmoid(1.702 * gate)
        layer.experts.__class__, layer.token_dispatcher.__class__ = experts, of_tokens
        chunk.zero_grad()
        inputs = x.clone().requires_grad_()
        output, _ = layer(inputs)
        output.square().sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found.append([output.detach(), inputs.grad, *gradients])
    *ours, expected = found
    errors = [
        float((a - b).abs().max()) for own in ours for a, b in zip(own, expected, strict=True)
    ]
    return {"errors": max(errors), "tensors": len(expected)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_and_dispatcher_equal_megatrons(name):
    for found in run_distributed(experts_both_ways, 1 if name == "one" else 2, name):
        assert found["errors"] < 1e-5 and found["tensors"] > 6
