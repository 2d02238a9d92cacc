"""Sizes and layer facts of Qwen3.5, how its tensors become Megatron's parameters, and in which
files they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gspo.models import FAMILIES, ModelError, family_of
from megatron_gspo.models.families import carried_names, hugging_face_names, names_of_own_type
from megatron_gspo.models.parameter_slices import ParameterSlice
from megatron_gspo.models.qwen35 import merge_separate
from tests.models.test_qwen_next import Memory, rows
from tests.support.tiny_models import tiny_config

KINDS = ("qwen35", "qwen35_text", "qwen35_moe", "qwen35_moe_text")
# What published configs add to the keys that Transformers writes.
PUBLISHED = dict(
    attn_output_gate=True,
    full_attention_interval=4,
    mamba_ssm_dtype="float32",
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
)


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model with changes of its language model's keys."""
    config = tiny_config(kind).to_dict()
    (config if kind.endswith("_text") else config["text_config"]).update(changes)
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_read_from_the_config(kind):
    family, shape = family_of(config_of(kind, **PUBLISHED))
    assert shape.model_type == family.model_type == kind.replace("qwen35", "qwen3_5")
    assert shape.mixers == ("gated_delta_net", "attention") * 2
    assert (shape.rotary.base, shape.rotary.dim, shape.rotary.interleaved, shape.head_dim) == (
        100.0,
        8,
        False,
        16,
    )
    assert (
        shape.attention_gate
        and shape.zero_centred_norms
        and shape.query_key_norms
        and not shape.attention_bias
    )
    sizes = shape.delta_net
    assert (sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, sizes.kernel) == (
        4,
        8,
        6,
        8,
        4,
    )
    if "moe" in kind:
        assert shape.moe_layers == (True,) * 4 and (shape.num_experts, shape.experts_per_token) == (
            4,
            2,
        )
        assert (shape.shared_expert_size, shape.shared_expert_gate, shape.router.normalize) == (
            24,
            True,
            True,
        )
        assert (shape.router.score, shape.moe_ffn_hidden_size) == ("softmax", 16)
    else:
        assert not shape.is_moe and shape.ffn_hidden_size == 48 and not shape.shared_expert_size


def test_a_quarter_of_each_head_is_rotated_where_nothing_is_said():
    config = config_of(
        "qwen35", rope_parameters=dict(rope_type="default", rope_theta=1e7), head_dim=32
    )
    rotary = family_of(config)[1].rotary
    assert (rotary.base, rotary.dim) == (1e7, 8)


def test_the_interval_gives_the_layers():
    config = config_of("qwen35_moe", full_attention_interval=4)
    del config["text_config"]["layer_types"]
    assert family_of(config)[1].mixers == ("gated_delta_net",) * 3 + ("attention",)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "qwen35",
            dict(num_experts=4),
            "num_experts=4 in a qwen3_5 config.json is not supported; known: 0",
        ),
        (
            "qwen35_moe",
            dict(attention_bias=True),
            "attention_bias=True in a qwen3_5_moe config.json",
        ),
        (
            "qwen35_moe_text",
            dict(decoder_sparse_step=2),
            "decoder_sparse_step=2 in a qwen3_5_moe_text config.json",
        ),
        ("qwen35_text", dict(hidden_act="gelu"), "hidden_act='gelu' in a qwen3_5_text config.json"),
        (
            "qwen35_moe",
            dict(linear_num_value_heads=6),
            "linear_num_value_heads=6 in config.json is no multiple of",
        ),
        ("qwen35_moe", dict(layer_types=["linear_attention"] * 3), "for each of 4 layers"),
    ],
)
def test_another_model_is_refused(kind, changes, message):
    with pytest.raises(ModelError, match=message):
        family_of(config_of(kind, **changes))


def test_null_for_the_language_model_is_refused():
    with pytest.raises(
        ModelError, match="model_type=None in the text_config of a qwen3_5 config.json"
    ):
        family_of(tiny_config("qwen35").to_dict() | {"text_config": None})


def test_names_of_the_two_kinds_of_files():
    """A published model's language model is a part of it, with the experts of a layer in one
    tensor.
    """
    published = set(hugging_face_names(*family_of(config_of("qwen35_moe"))))
    assert {
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.language_model.layers.3.self_attn.q_proj.weight",
        "model.language_model.layers.2.mlp.experts.gate_up_proj[3]",
    } <= published
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in published)
    text = set(hugging_face_names(*family_of(config_of("qwen35_moe_text"))))
    assert {"model.embed_tokens.weight", "model.layers.2.mlp.experts.3.gate_proj.weight"} <= text
    assert not any("language_model" in name for name in text)


def test_vision_and_multi_token_prediction_are_carried():
    names = {
        "mtp.fc.weight",
        "model.visual.patch_embed.proj.weight",
        "model.language_model.norm.weight",
    }
    assert carried_names(names, family_of(config_of("qwen35"))[1]) == names - {
        "model.language_model.norm.weight"
    }
    assert carried_names(names, family_of(config_of("qwen35_text"))[1]) == {"mtp.fc.weight"}


def test_decay_rates_and_the_norm_behind_them_are_kept_in_float32():
    family, shape = family_of(config_of("qwen35"))
    start = "model.language_model.layers.{}.linear_attn."
    expected = {start.format(layer) + name for layer in (0, 2) for name in ("A_log", "norm.weight")}
    assert names_of_own_type([], family, shape) == expected


def test_rows_lie_head_by_head():
    sizes = dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=1,
        linear_value_head_dim=1,
    )
    shape = family_of(config_of("qwen35", **sizes))[1]
    parts = (
        rows("q0", "q1", "k0", "k1", "v0", "v1", "v2", "v3"),
        rows("z0", "z1", "z2", "z3"),
        rows("b0", "b1", "b2", "b3"),
        rows("a0", "a1", "a2", "a3"),
    )
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
    assert torch.equal(merge_separate(parts, shape), expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_rows_of_the_whole_projection(ranks):
    family, shape = family_of(config_of("qwen35"))
    sizes = {
        "in_proj_qkv": (4 * 28, 3),
        "in_proj_z": (64, 3),
        "in_proj_b": (8, 3),
        "in_proj_a": (8, 3),
    }
    rule = next(rule for rule in family.layer_rules(shape, 0) if "in_proj" in rule.megatron[0])
    checkpoint = Memory(dict(zip(rule.names_in(0, 0), sizes.values(), strict=True)))
    whole = ParameterSlice(rule, 0, 0, (4 * 48, 3)).read(checkpoint, shape)
    start = "model.language_model.layers.0.linear_attn.in_proj_"
    # Behind the 28 rows of queries, keys, values.
    for name, first, size in (("b", 28, 2), ("a", 30, 2), ("z", 32, 16)):
        assert torch.equal(
            whole[first : first + size], checkpoint.tensors[f"{start}{name}.weight"][:size]
        ), name
    parts = [ParameterSlice(rule, 0, 0, (4 * 48 // ranks, 3), rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.read(checkpoint, shape) for part in parts]), whole)
    assert parts[0].whole_sizes(shape) == dict(
        zip(rule.names_in(0, 0), sizes.values(), strict=True)
    )


def test_a_rank_reads_its_rows_of_gate_and_up():
    """Rank 1 of two has the second halves of both, gate above up."""
    family, shape = family_of(config_of("qwen35_moe"))
    rule = next(
        rule for rule in family.experts if "linear_fc1" in rule.megatron[0] and rule.is_expert
    )
    whole = torch.arange(4 * 32 * 5.0).view(4, 32, 5)

    class Stacked:
        def shape(self, name):
            assert name == "model.language_model.layers.1.mlp.experts.gate_up_proj[2]"
            return (32, 5)

        def read(self, name, dim=None, start=0, stop=None):
            return whole[2] if dim is None else whole[2].narrow(dim, start, stop - start)

    part = ParameterSlice(rule, 1, 2, (16, 5), 1, 2)
    assert torch.equal(part.read(Stacked(), shape), torch.cat((whole[2, 8:16], whole[2, 24:32])))
    assert part.whole_sizes(shape) == {part.names[0]: (32, 5)}


def test_every_type_is_a_family():
    assert {kind.replace("qwen35", "qwen3_5") for kind in KINDS} <= FAMILIES.keys()
