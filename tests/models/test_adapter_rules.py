"""Which linear layers have adapters, and the bytes of Qwen3-30B-A3B's."""

from __future__ import annotations

from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.adapter_rules import (
    adapted_parts,
    linear_names,
    router_names,
)
from tests.support.tiny_models import tiny_config

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN = "examples/qwen3_moe/models/Qwen3-30B-A3B"


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
