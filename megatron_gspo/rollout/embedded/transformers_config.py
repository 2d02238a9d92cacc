"""The Transformers config of a model directory."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from megatron_gspo.models.families import FAMILIES
from megatron_gspo.models.model_shape import read_json


def transformers_config(path: str | Path) -> PretrainedConfig:
    """The config of a local model directory, under the type that Transformers has for its family.
    Code that comes with the model is not run. Raises ValueError or OSError where there is none."""
    content = read_json(Path(path) / "config.json")
    family = FAMILIES.get(content.get("model_type", ""))
    if family is None or family.type_in_transformers is None:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    facts = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(family.type_in_transformers, **facts)
