"""The names that a weight has in checkpoints of Megatron, which depend on how it was saved.

Layers are numbered in a key (``layers.3.mlp``), or are the first dimension of one tensor
(``layers.mlp``). Norms have other keys with Transformer Engine, which fuses them, than without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_gspo.mcore.checkpoint.tensor_boxes import Box

Sizes = tuple[int, ...]

_NUMBERED = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")
_STACKED = re.compile(r"(.*\blayers\.)(\D.*)")
_SAME_NORMS = (
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)
# Starts of the keys of what a checkpoint holds besides the weights of a language model's layers.
_OTHERS = ("optimizer", "chained_", "critic.", "rng_state", "rerun_state_machine_state", "mtp.")


@dataclass(frozen=True)
class Place:
    """A box of the tensor ``key`` of the sizes ``whole``."""

    key: str
    whole: Sizes
    box: Box


def stored_place(place: Place, stored: Mapping[str, Sizes], num_layers: int) -> Place:
    """The place under the key that a checkpoint has for it; unchanged where it has none.

    stored: key -> sizes of the checkpoint's tensors. num_layers: of the model.
    """
    candidates = (
        layered
        for named in _named_otherwise(place)
        for layered in (named, *_layered_otherwise(named, num_layers))
    )
    return next((candidate for candidate in candidates if candidate.key in stored), place)


def is_weight(key: str) -> bool:
    """Whether a checkpoint's key is of a weight that the model must have."""
    return not key.startswith(_OTHERS) and not key.endswith("_extra_state")


def _named_otherwise(place: Place) -> Iterator[Place]:
    yield place
    for names in _SAME_NORMS:
        for name, other in (names, names[::-1]):
            if name in place.key:
                yield Place(place.key.replace(name, other), place.whole, place.box)


def _layered_otherwise(place: Place, num_layers: int) -> Iterator[Place]:
    if numbered := _NUMBERED.fullmatch(place.key):
        before, layer, rest = numbered.groups()
        box = Box((int(layer), *place.box.offsets), (1, *place.box.sizes))
        yield Place(before + rest, (num_layers, *place.whole), box)
    elif (stacked := _STACKED.fullmatch(place.key)) and place.box.sizes[0] == 1:
        before, rest = stacked.groups()
        layer, *offsets = place.box.offsets
        box = Box(tuple(offsets), place.box.sizes[1:])
        yield Place(f"{before}{layer}.{rest}", place.whole[1:], box)
