"""The contents of Megatron's checkpoint from the meta device: each element once, the same keys
in every layout.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_gspo.mcore.checkpoint.checkpoint_metadata import checkpoint_metadata
from megatron_gspo.models import family_of
from tests.support.configs import parallel
from tests.support.tiny_models import tiny_config

LAYOUTS = [
    parallel(),
    parallel(tensor=2, expert=4),
    parallel(pipeline=4, expert=2),
    parallel(pipeline=2, virtual_pipeline=2),
    parallel(pipeline=3, embedding_as_layer=True, loss_as_layer=True),
    parallel(expert_tensor=2, tensor=2, expert=2),
]


def family_and_shape(kind: str, **overrides: object):
    config = tiny_config(kind, **overrides).to_dict()
    return family_of(config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_of_every_tensor_is_there_once(layout):
    each_element_once(layout, *family_and_shape("moe", vocab_size=95, mlp_only_layers=[1]))


def test_norms_over_all_heads_are_cut_like_their_heads():
    sizes = each_element_once(LAYOUTS[1], *family_and_shape("minimax"))
    norms = {
        key: size
        for key, size in sizes.items()
        if key.startswith("decoder.layers.0.self_attention.q_layernorm")
    }
    assert list(norms.values()) == [(4 * 16,)]


def each_element_once(layout, family, shape) -> dict[str, tuple[int, ...]]:
    """The whole size of each tensor, all of whose elements are there once."""
    counts: dict[str, torch.Tensor] = {}
    for chunk in checkpoint_metadata(family, shape, layout).chunks:
        whole = counts.setdefault(chunk.key, torch.zeros(chunk.whole, dtype=torch.int8))
        region = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        whole[region] += 1
    assert counts and all(bool((count == 1).all()) for count in counts.values())
    return {key: tuple(count.shape) for key, count in counts.items()}


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_keys_and_sizes_do_not_depend_on_the_layout(layout):
    family, shape = family_and_shape("moe")
    frames = [checkpoint_metadata(family, shape, each) for each in (parallel(), layout)]
    sizes = [{chunk.key: chunk.whole for chunk in frame.chunks} for frame in frames]
    assert sizes[0] == sizes[1] and frames[0].objects == frames[1].objects


def test_the_norm_before_the_experts_has_transformer_engines_key():
    """Of a layer with experts; a dense layer's is fused there, and has that key."""
    upstream = get_gpt_layer_local_spec(num_experts=4).submodules.sharded_state_dict_keys_map
    assert upstream["pre_mlp_layernorm."] == "mlp.linear_fc1.layer_norm_"
    family, shape = family_and_shape("moe", mlp_only_layers=[1])
    keys = {chunk.key for chunk in checkpoint_metadata(family, shape, parallel()).chunks}
    experts = "decoder.layers.0.pre_mlp_layernorm.weight"
    dense = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert {experts, dense} <= keys
    assert not {experts.replace(".0.", ".1."), dense.replace(".1.", ".0.")} & keys
