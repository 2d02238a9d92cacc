"""Lists of modules against the linear layers of Transformers' models, and their faults."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.models import FAMILIES, family_of
from megatron_gspo.models.quantization.module_list import (
    ModuleListError,
    chosen_modules,
    linear_modules,
    without_experts,
)
from megatron_gspo.models.qwen_next import QWEN_NEXT
from tests.support.tiny_models import tiny_config
from tests.support.transformers_reference import stored_name

KNOWN = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.11.mlp.experts.0.down_proj",
    "model.layers.11.mlp.experts.1.down_proj",
    "lm_head",
]
ALL = (
    "model.layers.*.self_attn.*",
    "model.layers.*.mlp.*",
    "model.layers.*.mlp.experts.*.*",
    "lm_head",
)


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        "moe",
        "shared",
        "deepseek",
        "moonlight",
        "glm",
        "glm_lite",
        "glm_dsa",
        "next",
        "minimax",
        "nemotron",
    ],
)
def test_linear_modules_are_those_of_transformers(kind):
    """All `nn.Linear`, and the router and experts, which Transformers has as parameters of
    other modules.
    """
    config = tiny_config(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            gate = ("gate_proj",) if hasattr(module, "gate_up_proj") else ()
            projections = (*gate, "up_proj", "down_proj")
            expected |= {
                f"{name}.{i}.{each}"
                for i in range(module.down_proj.shape[0])
                for each in projections
            }
        elif name.endswith(("mlp.gate", "mixer.gate")):
            expected.add(name)
    expected = {stored_name(f"{name}.", config.model_type)[:-1] for name in expected}
    families = FAMILIES | {family.model_type: family for family in QWEN_NEXT}
    family = families[config.model_type]
    modules = linear_modules(family, family.shape(config.to_dict()))
    assert len(modules) == len(set(modules)) and set(modules) == expected


def test_stacked_experts_have_no_format():
    assert linear_modules(*family_of(tiny_config("gpt_oss").to_dict())) == []


def test_a_star_is_one_component():
    chosen = chosen_modules(KNOWN, ALL[:3], ("lm_head", "model.layers.*.mlp.gate"))
    assert chosen == set(KNOWN) - {"lm_head", "model.layers.1.mlp.gate"}


def test_a_name_is_no_part_of_another():
    """`mlp.gate` is not `mlp.gate_proj`, layer 1 is not layer 11, and a dot is no wildcard."""
    for entry in (
        "mlp.gate",
        "layers.1.mlp.gate",
        "model.layers.1.mlp.gat",
        "model.layers.1.mlp",
        "modelXlayers.1.mlp.gate",
        "model.layers.1*.mlp.gate",
        "gate",
        "model.layers.*.gate",
    ):
        with pytest.raises(ModuleListError, match="matches no linear module"):
            chosen_modules(KNOWN, (*ALL, entry), ())


@pytest.mark.parametrize(
    ("modules", "exclude", "key", "text"),
    [
        (ALL[:3], (), "modules", "1 linear modules are in neither list, the first is lm_head"),
        ((), ("model.layers.*.mlp.gate",), "modules", "names no module"),
        (ALL, ("model.layers.*.mlp.gates",), "exclude", "did you mean model.layers.*.mlp.gate?"),
        (ALL, ("lm_head",), "modules", "all modules of this name are excluded"),
        (
            ALL,
            ("model.layers.0.self_attn.k_proj",),
            "modules",
            "q_proj without model.layers.0.self_attn.k_proj",
        ),
        (
            ALL,
            ("model.layers.1.mlp.up_proj",),
            "modules",
            "gate_proj without model.layers.1.mlp.up_proj",
        ),
        (ALL, ("model.layers.*.mlp.experts.1.*",), "modules", "experts.0.down_proj without"),
        (("qproj",), (), "modules", "did you mean model.layers.*.self_attn.q_proj?"),
    ],
)
def test_a_fault_names_list_entry_and_fix(modules, exclude, key, text):
    with pytest.raises(ModuleListError, match=re.escape(text)) as caught:
        chosen_modules(KNOWN, modules, exclude)
    assert caught.value.key == key and "\n" not in str(caught.value)


def test_experts_are_one_name():
    assert without_experts(KNOWN[-3:]) == ["model.layers.11.mlp.experts", "lm_head"]
