"""The layer against the recurrence in float64 in several layouts, and against Transformers'
module in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.gated_delta_net.layer import GatedDeltaNet
from megatron_gspo.mcore.model import transformer_config
from megatron_gspo.models.model_shape import DeltaNetSizes
from megatron_gspo.parallel.context_parallel import zigzag_indices
from tests.mcore.test_model import shape_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.naive_delta_net import DeltaNetWeights, naive_packed
from tests.support.parallel_groups import groups_of

SIZES = DeltaNetSizes(key_heads=4, value_heads=8, key_size=5, value_size=3, kernel=4)
HIDDEN = 32  # of shape_of()
LENGTHS = (8, 152, 16, 72, 8)  # some of several chunks; multiples of 2 * cp
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def draw(*sizes: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def naive_weights(seed: int = 0) -> DeltaNetWeights:
    keys = SIZES.key_heads * SIZES.key_size
    values = SIZES.value_heads * SIZES.value_size
    drawn = dict(
        in_qkv=draw(2 * keys + values, HIDDEN, seed=seed) / 4,
        in_z=draw(values, HIDDEN, seed=seed + 1) / 4,
        in_b=draw(SIZES.value_heads, HIDDEN, seed=seed + 2) / 4,
        in_a=draw(SIZES.value_heads, HIDDEN, seed=seed + 3) / 4,
        filters=draw(2 * keys + values, SIZES.kernel, seed=seed + 4),
        dt_bias=draw(SIZES.value_heads, seed=seed + 5),
        log_rate=draw(SIZES.value_heads, seed=seed + 6) - 1,
        norm=1 + draw(SIZES.value_size, seed=seed + 7) / 3,
        out=draw(HIDDEN, values, seed=seed + 8),
    )
    return DeltaNetWeights(**drawn, key_size=SIZES.key_size, key_heads=SIZES.key_heads)


def grouped(weights: DeltaNetWeights) -> dict[str, Tensor]:
    """The whole parameters of the layer, by a loop over key heads."""
    query, key, value = weights.in_qkv.split((20, 20, 24))
    query_taps, key_taps, value_taps = weights.filters.split((20, 20, 24))
    rows = []
    taps = []
    for head in range(SIZES.key_heads):
        keys = slice(5 * head, 5 * head + 5)
        values = slice(6 * head, 6 * head + 6)
        pair = slice(2 * head, 2 * head + 2)
        rows += [
            query[keys],
            key[keys],
            value[values],
            weights.in_b[pair],
            weights.in_a[pair],
            weights.in_z[values],
        ]
        taps += [query_taps[keys], key_taps[keys], value_taps[values]]
    return {
        "in_proj.weight": torch.cat(rows),
        "conv1d.weight": torch.cat(taps)[:, None],
        "dt_bias": weights.dt_bias,
        "A_log": weights.log_rate,
        "out_norm.weight": weights.norm,
        "out_proj.weight": weights.out,
    }


def layer_of(layout: Any, dtype: str = "float64", **model: Any) -> tuple[GatedDeltaNet, Any]:
    groups = groups_of(layout)
    config = transformer_config(shape_of(), layout, model_config(dtype=dtype, **model))
    return GatedDeltaNet(config, 1, sizes=SIZES, pg_collection=groups), groups


def shard(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    if name == "out_norm.weight":
        return whole
    return whole.chunk(ranks, dim=1 if name == "out_proj.weight" else 0)[rank]


LAYOUTS = {
    "1": (1, parallel(), {}),
    "full recompute": (1, parallel(), dict(recompute_granularity="full")),
    "tp2": (2, parallel(tensor=2), {}),
    "tp2 without sp": (2, parallel(tensor=2, sequence_parallel=False), {}),
    "cp2": (2, parallel(context=2), {}),
    "cp4": (4, parallel(context=4), {}),
    "tp2 cp2": (4, parallel(tensor=2, context=2), {}),
}


def errors_in_layout(rank: int, world_size: int, name: str) -> dict[str, float]:
    """Largest relative differences of this rank's output and gradients from the recurrence's."""
    _, layout, options = LAYOUTS[name]
    layer, groups = layer_of(layout, **options)
    weights = naive_weights()
    leaves = [x.requires_grad_() for x in vars(weights).values() if isinstance(x, Tensor)]
    whole = grouped(weights)
    hidden = draw(sum(LENGTHS), HIDDEN, seed=20).requires_grad_()
    out_weight = draw(sum(LENGTHS), HIDDEN, seed=21)
    expected = naive_packed(hidden, weights, BOUNDS.tolist())
    for value in whole.values():
        value.retain_grad() if not value.is_leaf else None
    # the gradient with respect to the layer's own layout: through `grouped`
    naive_gradients = dict(
        zip(
            map(id, leaves),
            torch.autograd.grad((expected * out_weight).sum(), leaves, retain_graph=True),
            strict=True,
        )
    )
    [hidden_gradient] = torch.autograd.grad((expected * out_weight).sum(), hidden)
    by_name = {
        key: naive_gradients[id(value)]
        for key, value in vars(weights).items()
        if isinstance(value, Tensor)
    }
    gradients = grouped(
        DeltaNetWeights(**by_name, key_size=SIZES.key_size, key_heads=SIZES.key_heads)
    )

    tp = groups.tp
    sp = layout.use_sequence_parallel
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.copy_(shard(key, whole[key], tp.rank(), tp.size()))
    mine = zigzag_indices(BOUNDS, groups.cp.rank(), groups.cp.size())
    if sp:
        mine = mine.chunk(tp.size())[tp.rank()]
    local = hidden.detach()[mine][:, None].requires_grad_()
    sequences = packed_sequences(BOUNDS, max(LENGTHS), groups.cp, torch.device("cpu"))
    found, _ = layer(local, packed_seq_params=sequences)
    (found[:, 0] * out_weight[mine]).sum().backward()
    errors = {
        "output": relative(found[:, 0], expected[mine]),
        "hidden": relative(local.grad[:, 0], hidden_gradient[mine]),
    }
    for key, parameter in layer.named_parameters():
        total = parameter.grad.clone()
        if groups.cp.size() > 1:
            torch.distributed.all_reduce(total, group=groups.cp)
        # As Megatron's finalize_model_grads.
        if sp and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(total, group=tp)
        errors[key] = relative(total, shard(key, gradients[key], tp.rank(), tp.size()))
    return errors


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layer_equals_the_recurrence(name):
    for errors in run_distributed(errors_in_layout, LAYOUTS[name][0], name):
        assert max(errors.values()) < 1e-10, errors


def test_layer_equals_transformers_in_float32():
    run_distributed(against_transformers, 1)


def against_transformers(rank: int, world_size: int) -> None:
    layer, groups = layer_of(parallel(), "float32")
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=5,
        linear_value_head_dim=3,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-6,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    weights = {key: value.float() for key, value in grouped(naive_weights()).items()}
    qkvz = []
    ba = []
    for block in weights["in_proj.weight"].chunk(SIZES.key_heads):  # theirs has z before b and a
        qkv, b_a, z = block.split((16, 4, 6))
        qkvz = [*qkvz, qkv, z]
        ba = [*ba, b_a]
    filters = naive_weights().filters.float()[:, None]
    theirs.load_state_dict(
        {
            "in_proj_qkvz.weight": torch.cat(qkvz),
            "in_proj_ba.weight": torch.cat(ba),
            "conv1d.weight": filters,
            "dt_bias": weights["dt_bias"],
            "A_log": weights["A_log"],
            "norm.weight": weights["out_norm.weight"],
            "out_proj.weight": weights["out_proj.weight"],
        }
    )
    layer.load_state_dict(weights, strict=False)
    hidden = draw(sum(LENGTHS), HIDDEN, seed=20, dtype=torch.float32)
    sequences = packed_sequences(BOUNDS, max(LENGTHS), groups.cp, torch.device("cpu"))
    ours = layer(hidden[:, None], packed_seq_params=sequences)[0][:, 0]
    pairs = zip(BOUNDS.tolist(), BOUNDS.tolist()[1:], strict=False)
    expected = torch.cat([theirs(hidden[None, start:end])[0] for start, end in pairs])
    naive = naive_packed(hidden.double(), naive_weights(), BOUNDS.tolist())
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(expected.double(), naive, rtol=2e-4, atol=2e-5)


def test_too_many_ranks_for_the_heads_are_refused():
    groups = groups_of(parallel()) if torch.distributed.is_initialized() else None
    assert groups is None
    [message] = run_distributed(refusal, 1)
    assert "context-parallel size = 8 does not divide the 4 key heads" in message


def refusal(rank: int, world_size: int) -> str:
    layer, groups = layer_of(parallel())

    class Wide:
        size = staticmethod(lambda: 8)

    collection = type("Groups", (), {"tp": groups.tp, "cp": Wide})
    with pytest.raises(ValueError) as raised:
        GatedDeltaNet(layer.config, 1, sizes=SIZES, pg_collection=collection)
    return str(raised.value)
