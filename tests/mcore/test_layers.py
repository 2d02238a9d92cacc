"""The torch layers: marks for sequence parallelism, and experts that equal Megatron's own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_gspo.mcore.layers import FusedSequentialMLP, MoELocalTokenDispatcher, RMSNorm
from megatron_gspo.mcore.model import build_model
from tests.mcore.test_model import shape_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of


def test_norms_carry_the_mark_of_sequence_parallelism():
    for marked in (True, False):
        config = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=True, sequence_parallel=marked)
        norm = RMSNorm(config, 8)
        assert norm.weight.sequence_parallel is marked


def experts_both_ways(rank: int, world_size: int) -> dict[str, float]:
    """Outputs and gradients of one MoE layer with our experts and dispatcher, and with Megatron's."""
    groups = groups_of(parallel())
    [chunk] = build_model(shape_of(), parallel(), model_config(), groups)
    layer = chunk.decoder.layers[0].mlp
    assert type(layer.experts) is FusedSequentialMLP and type(layer.token_dispatcher) is MoELocalTokenDispatcher
    x = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for own in (True, False):
        if not own:
            layer.experts.__class__, layer.token_dispatcher.__class__ = SequentialMLP, MoEAlltoAllTokenDispatcher
        chunk.zero_grad()
        inputs = x.clone().requires_grad_()
        output, _ = layer(inputs)
        output.square().sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found.append([output.detach(), inputs.grad, *gradients])
    return {"errors": max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), "tensors": len(found[0])}


def test_experts_and_dispatcher_equal_megatrons():
    found = run_distributed(experts_both_ways, 1)[0]
    assert found["errors"] < 1e-5 and found["tensors"] > 10
