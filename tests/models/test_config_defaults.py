"""What a config.json leaves out, or sets to null, means what it does in Transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatron_gspo.models import ModelError, ModelShape, family_of, read_config
from megatron_gspo.models.config_defaults import DEFAULTS
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
    "kimi",
    "glm_lite",
    "deepseek_v32",
    "glm_dsa",
    "glm",
    "gpt_oss",
    "minimax",
    "nemotron",
)


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
    forms = {"new": tiny_config(kind).to_dict()}
    old = copy.deepcopy(forms["new"])
    keys = language_keys(old)
    if "rope_parameters" in keys:
        forms["old"] = old
        rope = keys.pop("rope_parameters")
        keys["rope_theta"] = rope.pop("rope_theta")
        keys["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
        if rope.get("rope_type") != "default":
            rope["type"] = rope.pop("rope_type")
            keys["rope_scaling"] = rope
    made = []
    for form, config in forms.items():
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
