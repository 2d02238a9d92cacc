"""Hugging Face <-> Megatron as one table per model family; every rule is written once for both
directions.
"""

from megatron_gspo.models.families import FAMILIES, check_names, family_of, hugging_face_names
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule, Shard
from megatron_gspo.models.model_shape import ModelError, ModelShape, read_config

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
