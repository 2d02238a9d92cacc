"""Sizes and layer facts of Qwen3-Next, and how its tensors become Megatron's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.models import ModelError
from megatron_gspo.models.families import carried_names
from megatron_gspo.models.model_shape import ModelShape, check_sizes
from megatron_gspo.models.parameter_slices import ParameterSlice
from megatron_gspo.models.qwen_next import (
    QWEN_NEXT,
    merge_filters,
    merge_gated_qkv,
    merge_projection,
)
from tests.models.test_mapping_rules import numbered
from tests.support.tiny_models import tiny_config

CONFIG = tiny_config("next").to_dict()
(FAMILY,) = QWEN_NEXT


def shape_of(config: dict[str, Any]) -> ModelShape:
    check_sizes(config)
    return FAMILY.shape(config)


SHAPE = shape_of(CONFIG)


def test_facts_are_read_from_the_config():
    assert SHAPE.mixers == ("gated_delta_net", "attention") * 2 and SHAPE.moe_layers == (
        True,
        True,
        False,
        True,
    )
    assert (SHAPE.rotary.base, SHAPE.rotary.dim, SHAPE.head_dim) == (100.0, 8, 16)
    assert (
        SHAPE.attention_gate
        and SHAPE.zero_centred_norms
        and SHAPE.query_key_norms
        and not SHAPE.attention_bias
    )
    assert (SHAPE.shared_expert_size, SHAPE.shared_expert_gate, SHAPE.router.normalize) == (
        24,
        True,
        True,
    )
    sizes = SHAPE.delta_net
    assert (sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, sizes.kernel) == (
        4,
        8,
        6,
        8,
        4,
    )


def test_the_published_config_gives_an_interval_and_a_share():
    old = {
        key: value for key, value in CONFIG.items() if key not in ("layer_types", "rope_parameters")
    }
    shape = shape_of(
        old | dict(full_attention_interval=4, partial_rotary_factor=0.25, rope_theta=1e7)
    )
    assert shape.mixers == ("gated_delta_net",) * 3 + ("attention",)
    assert (shape.rotary.base, shape.rotary.dim) == (1e7, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_types=["linear_attention"] * 3), "for each of 4 layers"),
        (
            dict(layer_types=["linear_attention", "sliding_attention"] * 2),
            "linear_attention or full_attention",
        ),
        (
            dict(linear_num_value_heads=6),
            "linear_num_value_heads=6 in config.json is no multiple of",
        ),
        (dict(linear_conv_kernel_dim=0), "linear_conv_kernel_dim=0 in config.json is not a size"),
        (
            dict(hidden_act="gelu"),
            "hidden_act='gelu' in a qwen3_next config.json is not supported; known: 'silu'",
        ),
        (dict(attention_bias=True), "attention_bias=True in a qwen3_next config.json"),
    ],
)
def test_another_model_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        shape_of(CONFIG | changes)


def test_multi_token_prediction_is_carried():
    names = {"mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "model.norm.weight"}
    assert carried_names(names, SHAPE) == names - {"model.norm.weight"}


def rows(*names: str) -> Tensor:
    """A matrix of one column with a number for each row's name."""
    return torch.tensor([[float(ord(name[0]) * 100 + int(name[1:]))] for name in names])


def test_rows_lie_head_by_head():
    shape = shape_of(CONFIG | dict(head_dim=1, num_attention_heads=4, num_key_value_heads=2))
    merged = merge_gated_qkv(
        (rows("q0", "g0", "q1", "g1", "q2", "g2", "q3", "g3"), rows("k0", "k1"), rows("v0", "v1")),
        shape,
    )
    expected = rows("q0", "q1", "g0", "g1", "k0", "v0", "q2", "q3", "g2", "g3", "k1", "v1")
    assert torch.equal(merged, expected)

    sizes = dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=1,
        linear_value_head_dim=1,
    )
    shape = shape_of(CONFIG | sizes)
    mixed = rows("q0", "k0", "v0", "v1", "z0", "z1", "q1", "k1", "v2", "v3", "z2", "z3")
    rates = rows("b0", "b1", "a0", "a1", "b2", "b3", "a2", "a3")
    expected = rows(
        "q0",
        "k0",
        "v0",
        "v1",
        "b0",
        "b1",
        "a0",
        "a1",
        "z0",
        "z1",
        "q1",
        "k1",
        "v2",
        "v3",
        "b2",
        "b3",
        "a2",
        "a3",
        "z2",
        "z3",
    )
    assert torch.equal(merge_projection((mixed, rates), shape), expected)
    filters = merge_filters((rows("q0", "q1", "k0", "k1", "v0", "v1", "v2", "v3"),), shape)
    assert torch.equal(filters, rows("q0", "k0", "v0", "v1", "q1", "k1", "v2", "v3"))


class Memory:
    """A checkpoint of numbered tensors."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        self.tensors = {
            name: numbered(*size, start=10_000 * i) for i, (name, size) in enumerate(sizes.items())
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        tensor = self.tensors[name]
        return tensor if dim is None else tensor.narrow(dim, start, (stop or 0) - start)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_rows_of_the_whole_parameter(ranks):
    """Every rule of a gated delta net: the ranks' shards, one above the other, are the whole
    parameter.
    """
    sizes = {
        "in_proj.weight": 4 * (2 * 6 + 2 * 2 * 8 + 4),
        "conv1d.weight": 4 * 28,
        "dt_bias": 8,
        "A_log": 8,
    }
    checkpoint = Memory(
        {
            "in_proj_qkvz.weight": (4 * 44, 3),
            "in_proj_ba.weight": (16, 3),
            "conv1d.weight": (4 * 28, 1, 4),
            "dt_bias": (8,),
            "A_log": (8,),
        }
    )
    checkpoint.tensors = {
        f"model.layers.0.linear_attn.{name}": t for name, t in checkpoint.tensors.items()
    }
    for rule in FAMILY.layer_rules(SHAPE, 0):
        name = rule.megatron[0].removeprefix("self_attention.")
        if name in sizes:
            tail = checkpoint.shape(rule.names_in(0, 0)[0])[1:]
            whole = ParameterSlice(rule, 0, 0, (sizes[name], *tail)).read(checkpoint, SHAPE)
            assert whole.shape[0] == sizes[name]
            parts = [
                ParameterSlice(rule, 0, 0, (sizes[name] // ranks, *tail), rank, ranks)
                for rank in range(ranks)
            ]
            assert torch.equal(
                torch.cat([part.read(checkpoint, SHAPE) for part in parts]), whole
            ), name
