"""Which linear layers have adapters, and the bytes of Qwen3-30B-A3B's."""

from __future__ import annotations

from megatron_gspo.models import family_of
from megatron_gspo.models.adapter_rules import (
    linear_names,
    router_names,
)
from tests.support.tiny_models import tiny_config

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
