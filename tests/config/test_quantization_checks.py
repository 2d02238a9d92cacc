"""`rollout.quantization`: what has no effect, and what does not go with a model. Commands are
in `tests/bad_input`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.quantization_checks import resolve_quantization
from megatron_gspo.config.quantization_section import QuantizationConfig
from tests.support.tiny_models import save_tiny_model, tiny_config
from tests.support.training_runs import base_config

ALL = ("model.layers.*.self_attn.*", "model.layers.*.mlp.experts.*.*")
REST = ("model.layers.*.mlp.gate", "lm_head")


def section(**fields: Any) -> QuantizationConfig:
    return QuantizationConfig(**{"format": "int8", "modules": ALL, "exclude": REST, **fields})


def test_config_json_is_read_once(tmp_path):
    """A plan holds for a whole run, whatever becomes of the model's directory."""
    model = Path(save_tiny_model(tmp_path / "model"))
    quantization = {"format": "int8", "modules": list(ALL), "exclude": list(REST)}
    config = Config.from_dict(
        base_config(str(model), tmp_path / "run", rollout={"quantization": quantization})
    )
    plan = config.quantization_plan
    assert plan is not None and config.quantization_plan is plan
    (model / "config.json").unlink()
    assert config.quantization_plan is plan
    assert Config.from_dict(config.dump()) == config


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"format": "int8", "engine": "sft"}, "come from no model; set it to none"),
        ({"exclude": ["lm_head"]}, r"has no effect with rollout\.quantization\.format = none"),
        ({"format": "fp4"}, "fp8_tensor"),
    ],
)
def test_choices_that_contradict_each_other(quantization, text):
    sft = {"engine": "sft", "n_samples_per_prompt": 1} if quantization.pop("engine", "") else {}
    sections = {"algorithm": {"name": "sft"}, "training": {"global_batch_size": 4}} if sft else {}
    plain = base_config(
        "model", Path("run"), rollout={**sft, "quantization": quantization}, **sections
    )
    with pytest.raises(ConfigError, match=text):
        Config.from_dict(plain)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("moe", {"modules": ("model.layers.*.self_attn.qproj",)}, "modules"),
        ("moe", {"exclude": ("lm_heads",)}, "exclude"),
        ("gpt_oss", {}, "format"),
    ],
)
def test_lists_that_do_not_go_with_the_model(kind, changes, key):
    with pytest.raises(ConfigError) as caught:
        resolve_quantization(section(**changes), tiny_config(kind).to_dict())
    assert caught.value.key == f"rollout.quantization.{key}" and "\n" not in str(caught.value)
