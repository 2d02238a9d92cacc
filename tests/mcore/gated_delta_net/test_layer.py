"""The layer over packed sequences of several chunks against Transformers' module. Its layouts are
in tests/equivalence.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.gated_delta_net.layer import GatedDeltaNet
from megatron_gspo.mcore.model import transformer_config
from megatron_gspo.models.model_shape import DeltaNetSizes
from tests.mcore.test_model import shape_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of

SIZES = DeltaNetSizes(key_heads=4, value_heads=8, key_size=5, value_size=3, kernel=4)
HIDDEN = 32  # of shape_of()
LENGTHS = (8, 152, 16, 72, 8)


def by_key_head(theirs: Qwen3NextGatedDeltaNet) -> dict[str, Tensor]:
    """Transformers' weights as the layer has them: the rows of each key head together."""
    of_key_heads = []
    inputs = zip(
        theirs.in_proj_qkvz.weight.chunk(4), theirs.in_proj_ba.weight.chunk(4), strict=True
    )
    for qkvz, gates in inputs:
        qkv, z = qkvz.split((16, 6))
        of_key_heads += [qkv, gates, z]
    query, key, value = theirs.conv1d.weight.split((20, 20, 24))
    taps = zip(query.chunk(4), key.chunk(4), value.chunk(4), strict=True)
    return {
        "in_proj.weight": torch.cat(of_key_heads),
        "conv1d.weight": torch.cat([of_key_heads for head in taps for of_key_heads in head]),
        "dt_bias": theirs.dt_bias,
        "A_log": theirs.A_log,
        "out_norm.weight": theirs.norm.weight,
        "out_proj.weight": theirs.out_proj.weight,
    }


def compare(rank: int, world_size: int) -> None:
    groups = groups_of(parallel())
    config = transformer_config(shape_of(), parallel(), model_config())
    layer = GatedDeltaNet(config, 1, sizes=SIZES, pg_collection=groups)
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            linear_num_key_heads=SIZES.key_heads,
            linear_num_value_heads=SIZES.value_heads,
            linear_key_head_dim=SIZES.key_size,
            linear_value_head_dim=SIZES.value_size,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    for parameter in theirs.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    layer.load_state_dict(by_key_head(theirs), strict=False)

    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    sequences = packed_sequences(bounds, max(LENGTHS), groups.cp, torch.device("cpu"))
    hidden = torch.randn(sum(LENGTHS), HIDDEN, requires_grad=True)
    ours = layer(hidden[:, None], packed_seq_params=sequences)[0][:, 0]
    expected = torch.cat([theirs(sequence[None])[0] for sequence in hidden.split(LENGTHS)])
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5)
    weights = torch.randn(expected.shape)
    gradients = [
        torch.autograd.grad((output * weights).sum(), hidden)[0] for output in (ours, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=2e-3, atol=1e-3)

    wide = SimpleNamespace(tp=groups.tp, cp=SimpleNamespace(size=lambda: 8))
    with pytest.raises(ValueError, match="context-parallel size = 8 does not divide the 4 key"):
        GatedDeltaNet(config, 1, sizes=SIZES, pg_collection=wide)


def test_layer_equals_transformers():
    run_distributed(compare, 1)
