"""Latent attention over packed sequences against Transformers' module, sequence by sequence in
float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.model import build_model, transformer_config
from megatron_gspo.models import family_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import tiny_config

LENGTHS = (8, 20, 4, 12)
NAMES = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
}
CASES = {
    "YaRN, interleaved, queries from a latent": ("deepseek", {}),
    "queries from the hidden state": ("moonlight", {}),
    "halves rotated": ("glm_lite", {}),
    "YaRN, halves rotated": ("deepseek", dict(rope_interleave=False)),
}


def reference(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def expected(model: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The attention of the first layer over each sequence alone, [t, h]."""
    outputs = []
    for rows in hidden.split(LENGTHS):
        positions = torch.arange(len(rows))[None]
        rotation = model.model.rotary_emb(rows[None], positions)
        mask = torch.full((len(rows), len(rows)), -torch.inf, dtype=rows.dtype).triu(1)[None, None]
        outputs.append(model.model.layers[0].self_attn(rows[None], rotation, mask)[0][0])
    return torch.cat(outputs)


def compare(rank: int, world_size: int, name: str, layout: ParallelConfig) -> dict[str, float]:
    """Errors of this rank's output and gradients, relative to the largest value."""
    kind, changes = CASES[name]
    config = tiny_config(kind, num_hidden_layers=2, **changes)
    _, shape = family_of(config.to_dict())
    [chunk] = build_model(shape, layout, model_config(), groups := groups_of(layout))
    attention = chunk.decoder.layers[0].self_attention.double()
    model = reference(config)
    theirs = model.model.layers[0].self_attn
    parts = groups.tp.size()
    part = groups.tp.rank()
    with torch.no_grad():
        for own, parameter in attention.named_parameters():
            parameter.copy_(local(theirs.get_parameter(NAMES[own]), parameter, part))
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(
        sum(LENGTHS), config.hidden_size, generator=g, dtype=torch.float64, requires_grad=True
    )
    weight = torch.randn(hidden.shape, generator=g, dtype=torch.float64)
    wanted = expected(model, hidden)
    (wanted * weight).sum().backward()

    rows = slice(part * len(hidden) // parts, (part + 1) * len(hidden) // parts)
    inputs = hidden.detach()[rows, None].clone().requires_grad_()
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    sequences = packed_sequences(bounds, max(LENGTHS), groups.cp, torch.device("cpu"))
    output, _ = attention(inputs, packed_seq_params=sequences)
    (output[:, 0] * weight[rows]).sum().backward()
    errors = {
        "output": relative(output[:, 0], wanted[rows]),
        "input": relative(inputs.grad[:, 0], hidden.grad[rows]),
    }
    for own, parameter in attention.named_parameters():
        gradient = parameter.grad
        if getattr(parameter, "sequence_parallel", False):  # as Megatron does after the backward
            torch.distributed.all_reduce(gradient, group=groups.tp)
        errors[own] = relative(
            gradient, local(theirs.get_parameter(NAMES[own]).grad, parameter, part)
        )
    return errors


def local(whole: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """This rank's rows or columns of a tensor."""
    for dim, size in enumerate(parameter.shape):
        whole = whole.narrow(dim, rank * size if size < whole.shape[dim] else 0, size)
    return whole


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_module(name):
    [errors] = run_distributed(compare, 1, name, parallel())
    assert len(errors) == (7 if "hidden state" in name else 9)
    assert max(errors.values()) < 1e-6, errors  # Transformers' norms are float32


def test_tensor_parallel_ranks_share_latents_and_the_rotated_key():
    for errors in run_distributed(
        compare, 2, "YaRN, interleaved, queries from a latent", parallel(tensor=2)
    ):
        assert len(errors) == 9 and max(errors.values()) < 1e-6, errors


def refused(rank: int, world_size: int) -> str:
    _, shape = family_of(tiny_config("deepseek").to_dict())
    layout = parallel(tensor=2, sequence_parallel=False)
    with pytest.raises(ValueError, match="needs sequence parallelism|sequence parallel"):
        build_model(shape, layout, model_config(), groups_of(layout))
    return "refused"


def test_tensor_parallelism_without_sequence_parallelism_is_refused():
    assert run_distributed(refused, 2) == ["refused"] * 2


def test_transformer_engine_is_refused():
    _, shape = family_of(tiny_config("deepseek").to_dict())
    with pytest.raises(ValueError, match="latent_attention has torch layers only; use 'torch'"):
        transformer_config(shape, parallel(), model_config(implementation="transformer_engine"))
