"""Hugging Face <-> Megatron as one table per model family; every rule is written once for both
directions.

The names below are imported on first use, since most of them need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gspo.models.families import FAMILIES, check_names, family_of, hugging_face_names
    from megatron_gspo.models.family import Family
    from megatron_gspo.models.mapping_rules import Rule, Shard
    from megatron_gspo.models.model_shape import ModelError, ModelShape, read_config

_MODULE_OF = {
    "FAMILIES": "families",
    "Family": "family",
    "ModelError": "model_shape",
    "ModelShape": "model_shape",
    "Rule": "mapping_rules",
    "Shard": "mapping_rules",
    "check_names": "families",
    "family_of": "families",
    "hugging_face_names": "families",
    "read_config": "model_shape",
}

__all__ = [
    "FAMILIES",
    "Family",
    "ModelError",
    "ModelShape",
    "Rule",
    "Shard",
    "check_names",
    "family_of",
    "hugging_face_names",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
