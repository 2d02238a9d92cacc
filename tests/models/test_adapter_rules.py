"""Which linear layers have adapters, and the bytes of Qwen3-30B-A3B's."""

from __future__ import annotations

import torch

from megatron_gspo.models import Shard, family_of, read_config
from megatron_gspo.models.adapter_rules import (
    adapted_parts,
    adapter_rules,
    linear_names,
    router_names,
    rows_of_parts,
)
from tests.support.tiny_models import tiny_config

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN = "examples/qwen3_moe/models/Qwen3-30B-A3B"


def rule_of(name: str, kind: str = "moe"):
    family, shape = family_of(tiny_config(kind).to_dict())
    return next(r for r in family.layer_rules(shape, 1) if name in r.hugging_face[0]), shape


def test_names_of_families():
    assert linear_names(*family_of(tiny_config("moe").to_dict())) == ALL
    assert linear_names(*family_of(tiny_config("dense").to_dict())) == ALL
    latent = [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert linear_names(*family_of(tiny_config("deepseek").to_dict())) == latent
    assert linear_names(*family_of(tiny_config("gpt_oss").to_dict())) == ALL[:4], (
        "its experts are stored in one tensor"
    )
    assert linear_names(*family_of(tiny_config("minimax").to_dict())) == ALL[:4], (
        "Transformers renames its experts"
    )


def test_names_of_routers():
    names = dict(moe=["gate"], deepseek=["gate"], gpt_oss=["router"], dense=[], minimax=[])
    for kind, wanted in names.items():
        assert router_names(*family_of(tiny_config(kind).to_dict())) == wanted, kind


def test_parts_and_their_rows():
    rule, shape = rule_of("q_proj")
    assert adapted_parts(rule, None) == (0, 1, 2) and adapted_parts(rule, ("v_proj", "o_proj")) == (
        2,
    )
    router = rule_of("mlp.gate.weight")[0]
    assert adapted_parts(router, None) == () == adapted_parts(router, ("gate_proj",))
    assert adapted_parts(router, ("gate",)) == (0,)
    tensors = [torch.arange(n)[:, None] + start for n, start in ((64, 0), (32, 100), (32, 200))]
    fused = rule.merge(tensors, shape)
    for part, rows in zip(tensors, rows_of_parts(rule, (0, 1, 2), 128, shape), strict=True):
        assert torch.equal(fused[rows], part)


def test_rules_of_a_and_b():
    rule, shape = rule_of("experts.{expert}.gate_proj")
    a, b = adapter_rules(rule, (1,))
    assert (
        a.hugging_face == ("mlp.experts.{expert}.up_proj.lora_A.weight",) and a.shard is Shard.NONE
    )
    assert (
        b.hugging_face == ("mlp.experts.{expert}.up_proj.lora_B.weight",) and b.shard is Shard.ROWS
    )
    assert torch.equal(b.split(torch.arange(8)[:, None], shape)[0].flatten(), torch.arange(4, 8))
    a, b = adapter_rules(rule_of("o_proj")[0], (0,))
    assert (a.shard, b.shard) == (Shard.COLUMNS, Shard.NONE)


def test_adapters_of_30b_are_far_less_than_its_weights():
    """Rank 8 on all linear layers: by hand, and counted by the tables."""
    config = read_config(QWEN)
    family, shape = family_of(config)
    sizes = {
        "q_proj": (4096, 2048),
        "k_proj": (512, 2048),
        "v_proj": (512, 2048),
        "o_proj": (2048, 4096),
        "gate_proj": (768, 2048),
        "up_proj": (768, 2048),
        "down_proj": (2048, 768),
    }
    assert sizes["q_proj"] == (
        config["num_attention_heads"] * config["head_dim"],
        config["hidden_size"],
    )
    count = 0
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            for part in adapted_parts(rule, None):
                leaf = rule.hugging_face[part].split(".")[-2]
                count += 8 * sum(sizes[leaf]) * (shape.num_experts if rule.is_expert else 1)
    assert count == 48 * 8 * (6144 + 2 * 2560 + 6144 + 128 * 3 * 2816) == 421_920_768
    assert count / 30_532_122_624 < 0.014
