"""What a config.json leaves out, or sets to null, means what it does in Transformers, or is
refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from megatron_gspo.models import ModelError, ModelShape, family_of, read_config
from megatron_gspo.models.config_defaults import DEFAULTS, TEXT_SIZES
from tests.support.tiny_models import tiny_config

KINDS = (
    "dense",
    "moe",
    "shared",
    "next",
    "qwen35",
    "qwen35_text",
    "qwen35_moe",
    "qwen35_moe_text",
    "deepseek",
    "moonlight",
    "glm_lite",
    "glm",
    "gpt_oss",
    "minimax",
)
# Not of the class of this model type; what its layers do.
NOT_IN_CLASS = {
    "attention_bias": ("qwen2_moe", "minimax_m2"),
    "first_k_dense_replace": ("glm4_moe_lite",),
    "num_nextn_predict_layers": ("glm4_moe_lite",),
    "full_attention_interval": (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ),
}
NAMES = {"kimi_k2": "deepseek_v3"}  # Transformers has no class of its own


def text_of(config: PretrainedConfig) -> PretrainedConfig:
    text = getattr(config, "text_config", None)
    return config if text is None else text


def in_transformers(config: dict[str, Any]) -> ModelShape | None:
    """The shape with every key as Transformers has it; None where it refuses the config."""
    model_type = config["model_type"]
    try:
        read = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config)).to_dict()
    except Exception:  # of many types
        return None
    return shape_or_none(read)


def shape_or_none(config: dict[str, Any]) -> ModelShape | None:
    try:
        return family_of(copy.deepcopy(config))[1]
    except ModelError as error:
        assert "\n" not in str(error)
        return None


def language_keys(config: dict[str, Any]) -> dict[str, Any]:
    return config["text_config"] if "text_config" in config else config


def variants(kind: str, change: str) -> list[tuple[str, dict[str, Any]]]:
    """The config with each key, and each of its rotary embedding's, removed or null; in the new
    and the old form.
    """
    new = tiny_config(kind).to_dict()
    old = copy.deepcopy(new)
    keys = language_keys(old)
    rope = keys.pop("rope_parameters")
    keys["rope_theta"] = rope.pop("rope_theta")
    keys["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    if rope.get("rope_type") != "default":
        rope["type"] = rope.pop("rope_type")
        keys["rope_scaling"] = rope
    made = []
    for form, config in (("new", new), ("old", old)):
        for name in ("", "rope_parameters", "rope_scaling"):
            within = language_keys(config) if not name else language_keys(config).get(name)
            for key in within or ():
                changed = copy.deepcopy(config)
                target = language_keys(changed) if not name else language_keys(changed)[name]
                if change == "removed":
                    del target[key]
                else:
                    target[key] = None
                made.append((f"{form} {name}.{key}", changed))
    return made


@pytest.mark.parametrize("change", ["removed", "null"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_left_out_means_what_it_does_in_transformers(kind: str, change: str) -> None:
    whole = family_of(tiny_config(kind).to_dict())[1]
    taken = 0
    for name, config in variants(kind, change):
        if name.endswith(".model_type"):
            continue
        shape = shape_or_none(config)
        expected = in_transformers(config)
        if shape is not None and expected is not None:
            assert shape == expected, name
            taken += shape != whole
    assert taken >= (2 if change == "removed" else 0), "no default was compared"


@pytest.mark.parametrize("kind", KINDS)
def test_most_keys_may_be_left_out(kind: str) -> None:
    """Refusing everything would pass the test above."""
    for key in DEFAULTS[tiny_config(kind).model_type]:
        config = tiny_config(kind).to_dict()
        language_keys(config).pop(key, None)
        # Not with these sizes.
        if key not in ("num_key_value_heads", "first_k_dense_replace", "n_group", "topk_group"):
            assert shape_or_none(config) is not None, key


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_the_config_classes(model_type: str) -> None:
    config = text_of(CONFIG_MAPPING[NAMES.get(model_type, model_type)]())
    for key, default in (DEFAULTS[model_type] | TEXT_SIZES.get(model_type, {})).items():
        if key == "rope_theta":
            assert default == type(config).default_theta
        elif key == "partial_rotary_factor":
            assert default == config.rope_parameters.get(key, 1.0)
        elif key == "sliding_window" and model_type != "gpt_oss":
            assert default == type(config)(use_sliding_window=True).sliding_window
        elif model_type in NOT_IN_CLASS.get(key, ()):
            assert not hasattr(config, key)
        else:
            assert default == getattr(config, key), key


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_read_alike(kind: str, tmp_path: Path) -> None:
    """`save_pretrained` leaves out of a text_config what has its default, sizes too."""
    config = tiny_config(kind)
    config.save_pretrained(tmp_path)
    assert family_of(read_config(tmp_path))[1] == family_of(config.to_dict())[1]


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_config_of_defaults_alone_has_the_sizes_of_its_class(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    text = {"model_type": f"{model_type}_text"}
    sparse = {"model_type": model_type, "text_config": text}
    assert family_of(sparse)[1] == family_of(config.to_dict())[1]


@pytest.mark.parametrize(
    ("kind", "changes", "attribute", "value"),
    [
        ("glm", dict(rms_norm_eps=None), "rms_norm_eps", 1e-5),
        ("gpt_oss", dict(rms_norm_eps=None), "rms_norm_eps", 1e-5),
        ("deepseek", dict(routed_scaling_factor=None), "router.scaling", 2.5),
        ("glm_lite", dict(routed_scaling_factor=None), "router.scaling", 1.8),
        ("next", dict(norm_topk_prob=None), "router.normalize", True),
        ("moe", dict(norm_topk_prob=None), "router.normalize", False),
        ("dense", dict(head_dim=None), "head_dim", 128),
        ("gpt_oss", dict(head_dim=None, rope_parameters=None), "rotary.base", 150000.0),
        ("minimax", dict(rope_parameters=None), "rotary.base", 5e6),
        ("minimax", dict(rope_parameters=None), "rotary.dim", 16),
        ("moonlight", dict(q_lora_rank=None), "latent.query_rank", 1536),
    ],
)
def test_defaults_by_hand(
    kind: str, changes: dict[str, Any], attribute: str, value: object
) -> None:
    config = {key: each for key, each in tiny_config(kind).to_dict().items() if key not in changes}
    found: Any = family_of(config)[1]
    for name in attribute.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "moe",
            dict(num_local_experts=4, num_experts=8),
            "num_experts=8 and num_local_experts=4 .* two names",
        ),
        (
            "deepseek",
            dict(head_dim=20),
            "head_dim=20 in a deepseek_v3 config.json is not supported; known: 8",
        ),
        (
            "glm_lite",
            dict(mlp_layer_types=None, first_k_dense_replace=2),
            "first_k_dense_replace=2 .* known: 1",
        ),
        (
            "dense",
            dict(partial_rotary_factor=0.5, rope_parameters=None),
            "partial_rotary_factor=0.5 .* known: 1.0",
        ),
        (
            "gpt_oss",
            dict(rope_parameters={"full_attention": {}}),
            "rope_parameters with full_attention={} ",
        ),
        (
            "shared",
            dict(shared_expert_intermediate_size=0),
            "shared_expert_intermediate_size=0 .* is not a size",
        ),
        (
            "moe",
            dict(shared_expert_intermediate_size=8),
            "shared_expert_intermediate_size=8 .* known: 0",
        ),
    ],
)
def test_what_is_computed_otherwise_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(tiny_config(kind).to_dict() | changes)


def test_an_older_scaling_comes_before_new_parameters() -> None:
    """As in Transformers 5."""
    new = {"rope_type": "default", "rope_theta": 5.0}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = tiny_config("dense").to_dict() | {
        "rope_parameters": new,
        "rope_scaling": old,
        "rope_theta": 7.0,
    }
    shape = family_of(copy.deepcopy(config))[1]
    assert shape == in_transformers(config)
    assert shape.rotary.base == 7.0 and shape.rotary.yarn is not None


def test_the_share_of_minimax_comes_before_its_number_of_dimensions() -> None:
    config = tiny_config("minimax").to_dict() | {"rope_parameters": None, "rotary_dim": 4}
    assert family_of(config)[1].rotary.dim == 4
    for share, dims in ((0.5, 8), (1.0, 16)):
        changed = copy.deepcopy(config) | {"partial_rotary_factor": share}
        assert family_of(copy.deepcopy(changed))[1].rotary.dim == dims
        assert in_transformers(changed) == family_of(changed)[1]
